# SPDX-License-Identifier: Apache-2.0
"""The engine's tokens and forwards equal those of the published loops, in fp32 on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.harness import (
    BLOCKS,
    MAX_MODEL_LEN,
    NOISY,
    STOP_IDS,
    as_request,
    assert_parity,
    clear_case,
)
from tests.reference import golden
from tests.reference.decode import truncate

if TYPE_CHECKING:
    from tests.engine.harness import Engine
    from tests.reference.llada_model import LLaDAReference

SETTINGS: dict[str, dict[str, Any]] = {
    "one token a step": {"gen_length": 32, "block_length": 32, "steps": 32},
    "whole canvas in a step": {"gen_length": 32, "block_length": 32, "steps": 1},
    "uneven quotas": {"gen_length": 30, "block_length": 10, "steps": 9},
    "idle steps": {"gen_length": 16, "block_length": 4, "steps": 32},
    "small blocks": {"gen_length": 32, "block_length": 4, "steps": 16},
    "blocks of one token": {"gen_length": 8, "block_length": 1, "steps": 8},
    "one-token canvas": {"gen_length": 1, "block_length": 1, "steps": 1},
    "odd lengths": {"gen_length": 21, "block_length": 7, "steps": 6},
    "guidance": {**BLOCKS, "cfg_scale": 0.5},
    "strong guidance": {**BLOCKS, "cfg_scale": 3.0},
    "float64 confidence": {**BLOCKS, "confidence_dtype": "float64"},
    "confidence in the logits' dtype": {**BLOCKS, "confidence_dtype": "logits"},
    "no end-of-sequence": {**BLOCKS, "logits_eos_inf": True},
    "late end-of-sequence": {**BLOCKS, "confidence_eos_eot_inf": True},
    "both end-of-sequence options": {
        **BLOCKS,
        "logits_eos_inf": True,
        "confidence_eos_eot_inf": True,
    },
    "random remasking": {**BLOCKS, "remasking": "random", "seed": 11},
    "temperature": {**NOISY, "temperature": 1.0},
    "low temperature, 64-bit seed": {**NOISY, "temperature": 0.3, "seed": 2**63 + 5},
    "temperature and random remasking": {**NOISY, "temperature": 0.7, "remasking": "random"},
    "temperature and guidance": {**NOISY, "temperature": 0.5, "cfg_scale": 1.0},
    "temperature, late end-of-turn": {
        **NOISY,
        "temperature": 2.0,
        "confidence_eos_eot_inf": True,
    },
    "temperature, no end-of-sequence": {**NOISY, "temperature": 2.0, "logits_eos_inf": True},
    "threshold 0.3": {"gen_length": 32, "block_length": 16, "threshold": 0.3},
    "threshold 0.6": {"gen_length": 32, "block_length": 16, "threshold": 0.6},
    "threshold 0.9": {"gen_length": 32, "block_length": 16, "threshold": 0.9},
    "threshold 0.98": {"gen_length": 32, "block_length": 8, "threshold": 0.98},
    "threshold above 1": {"gen_length": 16, "block_length": 8, "threshold": 1.5},
    "threshold 0": {"gen_length": 32, "block_length": 8, "threshold": 0.0},
    "threshold by default": {"gen_length": 32, "block_length": 16, "algorithm": "threshold"},
    "threshold with guidance": {
        "gen_length": 32,
        "block_length": 16,
        "threshold": 0.8,
        "cfg_scale": 1.0,
    },
    "threshold with random scores": {
        "gen_length": 32,
        "block_length": 16,
        "threshold": 0.8,
        "remasking": "random",
        "seed": 3,
    },
    "threshold with temperature": {
        "gen_length": 16,
        "block_length": 8,
        "threshold": 0.6,
        "temperature": 0.6,
        "seed": 5,
    },
}


@pytest.mark.parametrize("asked", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_parameter(engine: Engine, model: LLaDAReference, asked: dict[str, Any]) -> None:
    assert_parity(engine, model, 20, asked)


@pytest.mark.parametrize("prompt_length", [1, 5, 77])
def test_prompts_of_several_lengths(
    engine: Engine, model: LLaDAReference, prompt_length: int
) -> None:
    assert_parity(engine, model, prompt_length, BLOCKS)
    assert_parity(
        engine, model, prompt_length, {"gen_length": 32, "block_length": 16, "threshold": 0.7}
    )


def test_a_request_that_fills_the_context(engine: Engine, model: LLaDAReference) -> None:
    assert_parity(engine, model, MAX_MODEL_LEN - BLOCKS["gen_length"], BLOCKS)


@pytest.mark.parametrize(
    "asked",
    [BLOCKS, {"gen_length": 32, "block_length": 8, "threshold": 0.6}],
    ids=["semi_ar", "threshold"],
)
def test_a_stop_id_ends_the_answer(
    engine: Engine, model: LLaDAReference, asked: dict[str, Any]
) -> None:
    """Same text as the whole canvas cut at its first stop id, for fewer forwards."""
    prompt, decoded = clear_case(model, 20, 2, **asked)
    canvas, (answer, reason) = decoded.ids, truncate(decoded.ids, STOP_IDS)
    place = len(answer)
    assert reason == "stop" and 0 < place <= len(canvas) - asked["block_length"]
    whole, stopped = engine.ask(
        as_request(prompt, **asked), as_request(prompt, ignore_eos=False, **asked)
    )
    assert whole.token_ids == canvas
    assert whole.finish_reason == "length"
    assert stopped.token_ids == canvas[: place + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.num_forwards is not None
    assert whole.num_forwards is not None
    stopping = golden.run(model, prompt, early_stop_ids=sorted(STOP_IDS), **asked)
    assert stopped.num_forwards <= stopping.num_forwards < whole.num_forwards

# SPDX-License-Identifier: Apache-2.0
"""The engine gives the tokens and forward passes of the published loops, in fp32 on the CPU."""

from typing import Any

import pytest
from reference.decode import truncate
from reference.models import LLaDAReference

from tests import golden
from tests.engine.cases import PARITY
from tests.engine.harness import (
    BLOCKS,
    MAX_MODEL_LEN,
    STOP_IDS,
    Engine,
    as_request,
    assert_parity,
    clear_case,
)


@pytest.mark.parametrize("parameters", PARITY.values(), ids=PARITY.keys())
def test_every_parameter(engine: Engine, model: LLaDAReference, parameters: dict[str, Any]) -> None:
    assert_parity(engine, model, 20, parameters)


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
    "parameters",
    [BLOCKS, {"gen_length": 32, "block_length": 8, "threshold": 0.6}],
    ids=["semi_ar", "threshold"],
)
def test_a_stop_id_ends_the_answer(
    engine: Engine, model: LLaDAReference, parameters: dict[str, Any]
) -> None:
    """The answer is the whole canvas cut at its first stop id, with fewer forward passes."""
    prompt, decoded = clear_case(model, 20, 2, **parameters)
    canvas, (answer, reason) = decoded.ids, truncate(decoded.ids, STOP_IDS)
    place = len(answer)
    assert reason == "stop" and 0 < place <= len(canvas) - parameters["block_length"]
    whole, stopped = engine.ask(
        as_request(prompt, **parameters), as_request(prompt, ignore_eos=False, **parameters)
    )
    assert whole.token_ids == canvas
    assert whole.finish_reason == "length"
    assert stopped.token_ids == canvas[: place + 1]
    assert stopped.finish_reason == "stop"
    assert stopped.num_forwards is not None
    assert whole.num_forwards is not None
    stopping = golden.run(model, prompt, early_stop_ids=sorted(STOP_IDS), **parameters)
    assert stopped.num_forwards <= stopping.num_forwards < whole.num_forwards

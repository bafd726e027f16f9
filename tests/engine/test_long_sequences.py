# SPDX-License-Identifier: Apache-2.0
"""Sequences longer than config.json allows, up to 2,097,152, if the variable allows them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from reference.models import load_reference

from tests.checkpoints import make_checkpoint, random_prompt
from tests.engine.harness import (
    BLOCKS,
    as_request,
    assert_parity,
    refusal_error,
    running,
)

VARIABLE = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
LONGEST = 2**21


@pytest.mark.parametrize("family", ["llada", "dream", "moe"])
def test_every_family_takes_the_longest(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    folder = make_checkpoint(tmp_path / "model", family=family, seed=3)
    with running(folder, max_model_len=LONGEST) as engine:
        (answer,) = engine.ask(as_request(random_prompt(700), gen_length=40, steps=5))
        assert len(answer.token_ids) == 40
        full = as_request([5] * (LONGEST - 39), gen_length=40, steps=5)
        with pytest.raises(refusal_error(), match=f"exceed max_model_len {LONGEST}"):
            engine.ask(full)
        tensors = [*engine.runner.model.parameters(), *engine.runner.model.buffers()]
        # No buffer has a row per position: rotations are computed for positions in use.
        assert max(max(tensor.shape, default=0) for tensor in tensors) < 700


def test_positions_beyond_the_configuration_are_those_of_the_reference(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    folder = checkpoint("mha")
    with running(folder, max_model_len=1024) as engine:
        assert_parity(engine, load_reference(folder), 500, BLOCKS)


def test_without_the_variable_the_configuration_bounds_the_length(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    folder = checkpoint("mha")
    with pytest.raises(ValidationError, match=VARIABLE), running(folder, max_model_len=1024):
        pass

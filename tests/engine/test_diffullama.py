# SPDX-License-Identifier: Apache-2.0
"""DiffuLLaMA in the engine gives the tokens and forward passes of the reference loop."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import DreamReference, load_reference, shift_right

from tests.checkpoints import MASK_ID, random_prompt
from tests.engine.harness import Engine, as_request, assert_parity, running

UNFILTERED: dict[str, Any] = {"algorithm": "dream", "gen_length": 24, "top_p": 1.0}


@pytest.fixture(scope="module")
def engine_and_reference(
    checkpoint: Callable[[str], Path],
) -> Iterator[tuple[Engine, DreamReference]]:
    folder = checkpoint("diffullama")
    with running(folder) as engine:
        yield engine, load_reference(folder)


@pytest.mark.parametrize(
    "parameters",
    [
        {"alg": "topk_margin", "steps": 1, "eps": 0.0},
        {"alg": "entropy", "steps": 8, "eps": 1e-3},
        {"alg": "maskgit_plus", "steps": 24, "eps": 0.0},
    ],
    ids=lambda parameters: parameters["alg"],
)
@pytest.mark.parametrize("prompt_length", [1, 13])
def test_parity(
    prompt_length: int,
    parameters: dict[str, Any],
    engine_and_reference: tuple[Engine, DreamReference],
) -> None:
    engine, reference = engine_and_reference
    assert_parity(engine, reference, prompt_length, {**UNFILTERED, **parameters})
    assert engine.is_idle()


def test_one_step_commits_the_likeliest_tokens_of_one_forward(
    engine_and_reference: tuple[Engine, DreamReference],
) -> None:
    engine, reference = engine_and_reference
    prompt = random_prompt(7, seed=2)
    logits = reference.logits(torch.tensor([prompt + [MASK_ID] * 12]))[0]
    wanted = shift_right(logits)[7:].argmax(dim=-1).tolist()
    parameters = {"gen_length": 12, "steps": 1, "temperature": 0}
    (answer,) = engine.ask(as_request(prompt, **parameters))
    assert (answer.token_ids, answer.num_forwards) == (wanted, 1)


def test_its_own_sampler_takes_64_forwards(
    engine_and_reference: tuple[Engine, DreamReference],
) -> None:
    """Each masked position is committed with probability 1 / (remaining forward passes)."""
    engine, _ = engine_and_reference
    parameters = {"gen_length": 96, "seed": 3, "temperature": 0.9}
    (answer,) = engine.ask(as_request(random_prompt(9, seed=1), **parameters))
    assert len(answer.token_ids) == 96
    assert answer.num_forwards <= 64
    # Fewer forward passes, by chance, are unlikely for 96 positions.
    assert answer.num_forwards > 48

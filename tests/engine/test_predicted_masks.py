# SPDX-License-Identifier: Apache-2.0
"""A model that predicts the mask token: requests end, and no mask is returned."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.decode import near_ties
from reference.models import LLaDAReference, load_reference

from tests.checkpoints import MASK_ID, random_prompt
from tests.engine.harness import BLOCKS, Engine, as_request, running
from tests.golden import reference


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with running(checkpoint("predicts_mask")) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> LLaDAReference:
    return load_reference(checkpoint("predicts_mask"))


def other_tokens(model: LLaDAReference, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best token of every position except the mask, and its renormalised probability."""
    logits = model.logits(row[None])[0]
    logits[:, MASK_ID] = -torch.inf
    probability, token = torch.softmax(logits, dim=1).max(dim=1)
    return token, probability


def test_what_the_quotas_leave_is_filled_in_one_more_forward(
    engine: Engine, model: LLaDAReference
) -> None:
    num_checked = 0
    for seed in range(40):
        prompt = random_prompt(20, seed)
        wanted = reference(model, prompt, **BLOCKS)
        if MASK_ID not in wanted.ids or near_ties(wanted.trace):
            continue
        row = torch.tensor(prompt + wanted.ids)
        filled = torch.where(row == MASK_ID, other_tokens(model, row)[0], row)
        (answer,) = engine.ask(as_request(prompt, **BLOCKS))
        assert answer.token_ids == filled[20:].tolist()
        assert answer.num_forwards == wanted.num_forwards + 1
        num_checked += 1
        if num_checked == 2:
            return
    raise AssertionError(f"only {num_checked} of 40 prompts leave masks without near-ties")


def threshold_loop(
    model: LLaDAReference, prompt: list[int], length: int, limit: float
) -> tuple[list[int], int, int]:
    """Decode one block; after a forward pass without commits, the next one forbids the mask.

    Returns the canvas, the number of forward passes, and the number of passes that forbid the mask.
    """
    row = torch.tensor(prompt + [MASK_ID] * length)
    num_forwards = num_forbidden = 0
    forbid = False
    while (row == MASK_ID).any():
        if forbid:
            token, probability = other_tokens(model, row)
        else:
            probability, token = torch.softmax(model.logits(row[None])[0], dim=1).max(dim=1)
        score = probability.masked_fill(row != MASK_ID, -1.0)
        accepted = score >= limit
        accepted[score.argmax()] = True
        num_forwards += 1
        num_forbidden += forbid
        forbid = bool((token[accepted] == MASK_ID).all())
        row = torch.where(accepted, token, row)
    return row[len(prompt) :].tolist(), num_forwards, num_forbidden


def test_a_threshold_goes_on_without_the_mask(
    engine: Engine, model: LLaDAReference, checkpoint: Callable[[str], Path]
) -> None:
    exact = LLaDAReference.from_checkpoint(checkpoint("predicts_mask"), torch.float64)
    parameters: dict[str, Any] = {"gen_length": 32, "block_length": 32, "threshold": 0.9}
    num_checked = 0
    for seed in range(40):
        prompt = random_prompt(20, seed)
        wanted = threshold_loop(model, prompt, 32, 0.9)
        canvas, num_forwards, num_forbidden = wanted
        if num_forbidden == 0 or threshold_loop(exact, prompt, 32, 0.9) != wanted:
            continue  # no mask was forbidden, or the tokens depend on rounding
        (answer,) = engine.ask(as_request(prompt, **parameters))
        assert (answer.token_ids, answer.num_forwards) == (canvas, num_forwards), seed
        num_checked += 1
        if num_checked == 2:
            return
    raise AssertionError(f"only {num_checked} of 40 prompts come to a standstill")

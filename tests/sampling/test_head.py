# SPDX-License-Identifier: Apache-2.0
"""Sampling within the output head's product gives the results of sampling from stored logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sampling.support import EOS, EOT, MASK, HeadModel, group, head_model, hidden_rows
from vllm.diffusion import ops
from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.sampling import RowGroup, sample

NUM_ROWS = 12
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# With these parameters, the most likely tokens can be sampled without stored logits.
PLAIN: list[dict[str, Any]] = [
    {},
    {"forbid_mask": True},
    {"logits_eos_inf": True, "forbid_mask": True},
    {"confidence_eos_eot_inf": True},
    {"remasking": "random"},
]
# These parameters require stored logits.
DEMANDING: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"adjust": lambda logits, positions: logits},
    {"confidence_dtype": "float64"},
    {"cfg_scale": 1.5, "unconditional": 4},
    {"scoring": CandidateScoring(score="negative_entropy", epsilon=1e-10)},
    {"scoring": CandidateScoring(score="margin")},
]


@pytest.fixture(autouse=True)
def always_in_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "samples_in_head", lambda x, matrix: True)  # regardless of speed


def model_on(device: str) -> HeadModel:
    """Return a model, which is in bf16 on a GPU, because the kernel requires that."""
    model = head_model()
    model.weight = model.weight.to(device, dtype_on(device))
    return model


def dtype_on(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def groups_of(parameters: list[dict[str, Any]], device: str = "cpu") -> list[RowGroup]:
    """Return groups of four rows for each request, in order."""
    results = []
    for number, wanted in enumerate(parameters):
        options = {name: value for name, value in wanted.items() if name != "adjust"}
        rows = group(list(range(4 * number, 4 * number + 4)), step=number, **options)
        positions = rows.positions.to(device)
        results.append(replace(rows, positions=positions, adjust=wanted.get("adjust")))
    return results


def sampled(model: HeadModel, hidden: Tensor, groups: list[RowGroup], *, in_head: bool) -> Tensor:
    model.head_matrix = model.weight if in_head else None
    model.most_rows = 0
    return sample(model, hidden, groups).table


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", range(len(PLAIN)))
def test_tokens_and_scores_are_those_of_stored_logits(device: str, first: int) -> None:
    """A request is sampled alone, and with requests that forbid and exclude other tokens."""
    model, hidden = model_on(device), hidden_rows(NUM_ROWS).to(device, dtype_on(device))
    for parameters in (PLAIN[first : first + 1], (PLAIN[first:] + PLAIN[:first])[:3]):
        groups = groups_of(parameters, device)
        rows = hidden[: 4 * len(groups)]
        stored = sampled(model, rows, groups, in_head=False)
        assert model.most_rows == len(rows)
        actual = sampled(model, rows, groups, in_head=True)
        assert model.most_rows == 0  # no logits were computed
        assert torch.equal(actual[0], stored[0]) and torch.equal(actual[2], stored[2])
        tolerance = 1e-5 if device == "cpu" else 2**-8
        torch.testing.assert_close(actual[1], stored[1], rtol=tolerance, atol=1e-7)


def test_the_special_tokens_matter() -> None:
    """Masks of special tokens change the samples of these rows, so the other tests detect them."""
    model, hidden = model_on("cpu"), hidden_rows(400)
    index = list(range(400))
    tokens = {
        name: sample(model, hidden, [group(index, **parameters)]).tokens.tolist()
        for name, parameters in (("free", {}), ("masked", PLAIN[1]), ("no eos", PLAIN[2]))
    }
    assert MASK in tokens["free"] and MASK not in tokens["masked"]
    assert EOS in tokens["masked"] and EOS not in tokens["no eos"]
    assert EOT in tokens["no eos"]


@pytest.mark.parametrize("number", range(len(DEMANDING)))
def test_who_wants_more_has_logits(number: int) -> None:
    """All requests of a part then use stored logits, because two reads of the matrix cost more."""
    model, hidden = model_on("cpu"), hidden_rows(NUM_ROWS)
    groups = groups_of([{}, DEMANDING[number]])
    stored = sampled(model, hidden, groups, in_head=False)
    actual = sampled(model, hidden, groups, in_head=True)
    assert model.most_rows == NUM_ROWS
    assert torch.equal(actual, stored)


def test_rows_that_are_apart_have_logits() -> None:
    model, hidden = model_on("cpu"), hidden_rows(NUM_ROWS)
    groups = [group([0, 1]), group([4, 5])]
    stored = sampled(model, hidden, groups, in_head=False)
    assert torch.equal(sampled(model, hidden, groups, in_head=True), stored)
    assert model.most_rows == NUM_ROWS


@pytest.mark.parametrize("num_rows", [0, 3])
def test_no_rows_and_ties(num_rows: int) -> None:
    """Equal logits go to the lowest token that is not forbidden."""
    model = HeadModel(torch.ones(40, 16))
    wanted = group(list(range(num_rows)), forbid_mask=True)
    actual = sampled(model, torch.ones(num_rows, 16), [wanted], in_head=True)
    lowest = min(set(range(40)) - {MASK})
    assert actual.shape == (3, num_rows) and (actual[0] == lowest).all()
    torch.testing.assert_close(actual[1], torch.full((num_rows,), 1 / 39).double())

# SPDX-License-Identifier: Apache-2.0
"""Routing and the mixture of experts by themselves."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from vllm.diffusion import ops
from vllm.diffusion.layers.moe import route

NUM_EXPERTS, WIDTH, INNER = 6, 8, 16


def matrices(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(NUM_EXPERTS, 2 * INNER, WIDTH, generator=generator)
    return w1, torch.randn(NUM_EXPERTS, WIDTH, INNER, generator=generator)


def plain_mixture(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """The definition, one row and expert at a time, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for row in range(len(x)):
        for slot in range(expert_ids.shape[1]):
            expert = int(expert_ids[row, slot])
            gate, up = (w1[expert].double() @ x[row].double()).chunk(2)
            term = w2[expert].double() @ (functional.silu(gate) * up)
            out[row] += weights[row, slot].double() * term
    return out


@pytest.mark.parametrize("num_chosen", [1, 2, NUM_EXPERTS])
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_mixture_equals_its_definition(num_rows: int, num_chosen: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, WIDTH, generator=generator)
    ids = torch.rand(num_rows, NUM_EXPERTS, generator=generator).argsort(dim=1)[:, :num_chosen]
    weights = torch.rand(num_rows, num_chosen, generator=generator)
    kept = x.clone()
    given = ops.mix_experts(x, ids, weights, *matrices())
    wanted = plain_mixture(x, ids, weights, *matrices())
    torch.testing.assert_close(given.double(), wanted, rtol=1e-5, atol=1e-4)
    assert given.shape == x.shape and given.is_contiguous()
    assert torch.equal(x, kept)


def test_all_rows_with_one_expert() -> None:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    ids, weights = torch.full((5, 1), NUM_EXPERTS - 1), torch.ones(5, 1)
    wanted = plain_mixture(x, ids, weights, *matrices())
    given = ops.mix_experts(x, ids, weights, *matrices())
    torch.testing.assert_close(given.double(), wanted, rtol=1e-5, atol=1e-4)


def test_terms_are_added_in_ascending_order_in_the_model_dtype() -> None:
    """256 + 1 is 256 in bf16, so the sum tells in which order the terms came, and how rounded."""
    x = torch.zeros(1, WIDTH, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    w1 = torch.zeros(3, 2 * INNER, WIDTH, dtype=torch.bfloat16)
    w1[:, 0, 0] = 32.0  # silu(32) is 32 in bf16
    w1[:, INNER, 0] = 1.0
    w2 = torch.zeros(3, WIDTH, INNER, dtype=torch.bfloat16)
    w2[:, 0, 0] = torch.tensor([1.0, 256.0, 1.0]) / 32.0
    ids, weights = torch.tensor([[2, 0, 1]]), torch.ones(1, 3, dtype=torch.bfloat16)
    assert ops.mix_experts(x, ids, weights, w1, w2)[0, 0] == 256.0  # 258 in any other way


def test_weights_are_probabilities_over_all_experts() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ids, weights = route(logits, 2)
    assert ids.tolist() == [[1, 3]]
    wanted = torch.softmax(logits.double(), dim=-1)[:, [1, 3]]
    torch.testing.assert_close(weights.double(), wanted)
    assert weights.sum() < 0.95  # not made to sum to 1


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    ids, weights = route(logits, 2, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.softmax(logits, dim=-1)[:, [0, 1]])


def test_the_lowest_expert_wins_among_equals() -> None:
    ids, _ = route(torch.zeros(40, 64), 8)
    assert ids.tolist() == [list(range(8))] * 40


def test_bf16_logits_are_widened_before_the_softmax() -> None:
    logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    ids, weights = route(logits, 8)
    wide = torch.softmax(logits.float(), dim=-1)
    assert weights.dtype == torch.bfloat16
    assert torch.equal(weights, wide.gather(1, ids).to(torch.bfloat16))

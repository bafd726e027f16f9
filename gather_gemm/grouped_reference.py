# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of the operations on experts; they define where results are rounded."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

if TYPE_CHECKING:
    from torch import Tensor


def route(logits: Tensor, num_chosen: int, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, slots and ends; see `gather_gemm.route`."""
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = probabilities if bias is None else probabilities + bias
    # a stable sort, as topk leaves the order of equals open
    ranked = scores.sort(dim=-1, descending=True, stable=True).indices
    chosen = ranked[:, :num_chosen].sort(dim=-1).values
    weights = probabilities.gather(-1, chosen).to(logits.dtype)
    slots = chosen.flatten().argsort(stable=True).to(torch.int32)
    return weights, slots, _group_ends(chosen, logits.shape[1])


def _group_ends(chosen: Tensor, num_experts: int) -> Tensor:
    """The end [E] int32 of each expert's rows when the rows are sorted by expert.

    Sums of ones, and not `bincount`, which makes the host wait for a GPU.
    """
    counts = torch.zeros(num_experts, dtype=torch.int32, device=chosen.device)
    ones = torch.ones((), dtype=torch.int32, device=chosen.device)
    counts.scatter_add_(0, chosen.flatten(), ones.expand(chosen.numel()))
    return counts.cumsum(0, dtype=torch.int32)


def grouped_gemm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The product [S, N] of each group of rows with its own matrix, transposed."""
    out = x.new_empty(len(x), weight.shape[1])
    bounds = itertools.pairwise([0, *ends.tolist()])
    for matrix, (start, end) in zip(weight, bounds, strict=True):
        if end > start:
            torch.mm(x[start:end], matrix.t(), out=out[start:end])
    return out


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [S, 2I], the gate's columns first, in the model dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def weighted_terms(down: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """Rows [S, D] in the order of `slots`, put back as [R, k, D] and weighted [R, k]."""
    terms = torch.empty_like(down)
    terms[slots] = down
    return terms.view(*weights.shape, down.shape[1]).mul_(weights[:, :, None])


def sum_terms(terms: Tensor) -> Tensor:
    """The sum over k of [R, k, D], first to last, each rounded; see `gather_gemm.sum_terms`."""
    total = terms[:, 0].clone(memory_format=torch.contiguous_format)
    for index in range(1, terms.shape[1]):
        total.add_(terms[:, index])
    return total

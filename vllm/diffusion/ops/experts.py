# SPDX-License-Identifier: Apache-2.0
"""A mixture of gated MLPs: every row goes through a few of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gather_gemm import grouped_gemm
from vllm.diffusion.ops.fused import silu_mul

if TYPE_CHECKING:
    from torch import Tensor


def mix_experts(x: Tensor, expert_ids: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Sum over the chosen experts of weight * expert(x).

    The rows are sorted by expert and each expert multiplies its rows alone, without padding. As
    in the public code of LLaDA-MoE a row's terms are added in ascending order of the expert, and
    every product and sum is rounded to the model dtype.

    Args:
        x: [R, D], model dtype.
        expert_ids: [R, k] int64, each in [0, E), distinct within a row.
        weights: [R, k], model dtype.
        w1: [E, 2I, D], the gate's rows first, model dtype.
        w2: [E, D, I], model dtype.

    Returns:
        [R, D], model dtype: the sum of this rank's I where the experts' width is sharded.
    """
    num_rows, num_chosen = expert_ids.shape
    expert_ids, order = expert_ids.sort(dim=-1)
    weights = weights.gather(-1, order)
    by_expert = expert_ids.flatten().argsort(stable=True)  # [R * k], slots of the rows
    ends = _group_ends(expert_ids, num_experts=len(w1))
    # nested, so that the widest rows are freed before the second product allocates its own
    inner = silu_mul(grouped_gemm(x.index_select(0, by_expert // num_chosen), w1, ends))
    down = grouped_gemm(inner, w2, ends)
    terms = torch.empty_like(down)
    terms[by_expert] = down
    terms = terms.view(num_rows, num_chosen, x.shape[1]).mul_(weights[:, :, None])
    total = terms[:, 0]
    for slot in range(1, num_chosen):
        total = total.add_(terms[:, slot])
    return total.contiguous()


def _group_ends(expert_ids: Tensor, num_experts: int) -> Tensor:
    """The end [E] int32 of each expert's rows when the rows are sorted by expert.

    Sums of ones, and not `bincount`, which makes the host wait for a GPU.
    """
    counts = torch.zeros(num_experts, dtype=torch.int32, device=expert_ids.device)
    ones = torch.ones((), dtype=torch.int32, device=expert_ids.device)
    counts.scatter_add_(0, expert_ids.flatten(), ones.expand(expert_ids.numel()))
    return counts.cumsum(0, dtype=torch.int32)

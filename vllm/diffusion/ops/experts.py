# SPDX-License-Identifier: Apache-2.0
"""A mixture of gated MLPs: every row goes through a few of the experts.

The rows are sorted by expert and each expert multiplies its rows alone, without padding. As in the
public code of LLaDA-MoE a row's terms are added in ascending order of the expert, and every
product and sum is rounded to the model dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import gather_gemm
from gather_gemm import Routing
from vllm.diffusion.ops import dispatch
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm_add_llada.cuda_kernels import fused_ops

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.buffers import Buffers

__all__ = ["Routing", "add_experts", "route_rows"]


def route_rows(x: Tensor, gate: Tensor, num_chosen: int, bias: Tensor | None = None) -> Routing:
    """Choose experts for each row by a softmax in fp32 over the logits ``x @ gate.T``.

    Args:
        x: [R, D], model dtype.
        gate: [E, D], model dtype; no kernel of a step writes it.
        num_chosen: k, from 1 to E.
        bias: [E] fp32, added to the probabilities for the choice only.
    """
    if dispatch.routes_compiled(len(x)) and fused_ops.has_router(x, gate):
        return Routing(*fused_ops.route_rows(x, gate, num_chosen, bias))
    if dispatch.routes_scored(len(x)):
        return gather_gemm.route_rows(x, gate, num_chosen, bias)
    return gather_gemm.route(torch.mm(x, gate.t()), num_chosen, bias)


def weighted_terms(inner: Tensor, w2: Tensor, routing: Routing) -> Tensor:
    """Each row's terms [R, k, D]: the experts' second products, weighted.

    Args:
        inner: [R * k, I], what `gather_gemm.gated_gemm` gave just before: the routing and w2 are
            read while that runs out.
        w2: [E, D, I], model dtype.
        routing: the rows' experts.
    """
    streams = dispatch.streams_experts(len(inner), len(w2))
    streams = streams and fused_ops.has_weighted_gemm(inner, w2)
    weighted_gemm = fused_ops.weighted_gemm if streams else gather_gemm.weighted_gemm
    weights, slots, ends = routing
    return weighted_gemm(inner, w2, ends, slots, weights, early=True)


def add_experts(
    x: Tensor, normed: Tensor, routing: Routing, w1: Tensor, w2: Tensor, scratch: Buffers
) -> None:
    """x += sum over the chosen experts of weight * expert(normed), in place.

    Summed over the ranks where the experts' width is sharded. Launched from shapes alone, so a
    CUDA graph of it holds for any routing.

    Args:
        x: [R, D], model dtype.
        normed: [R, D], model dtype; not x.
        routing: the rows' experts, from `route_rows`.
        w1: [E, 2I, D], the gate's rows first, model dtype.
        w2: [E, D, I], model dtype.
        scratch: hears what PyTorch allocates for the while.
    """
    weights, slots, ends = routing
    num_terms, row_bytes = weights.numel(), x.shape[1] * x.element_size()
    scratch.expect("activated of experts", num_terms * w2.shape[2] * x.element_size())
    scratch.expect("terms of experts", num_terms * row_bytes)
    inner = gather_gemm.gated_gemm(normed, slots, weights.shape[1], w1, ends)
    terms = weighted_terms(inner, w2, routing)
    del inner  # before the sum allocates its own
    if get_tensor_model_parallel_world_size() == 1:
        gather_gemm.add_terms(x, terms)
    else:
        scratch.expect("summed over ranks", 2 * len(x) * row_bytes)
        x.add_(tensor_model_parallel_all_reduce(gather_gemm.sum_terms(terms)))

# SPDX-License-Identifier: Apache-2.0
"""A mixture of gated MLPs: every row goes through a few of the experts.

The rows are sorted by expert and each expert multiplies its rows alone, without padding. As in the
public code of LLaDA-MoE a row's terms are added in ascending order of the expert, and every
product and sum is rounded to the model dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gather_gemm import (
    Routing,
    add_terms,
    gated_gemm,
    route_rows,
    sum_terms,
    weighted_gemm,
)
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.buffers import Buffers

__all__ = ["Routing", "add_experts", "route_rows"]


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
    # nested, so that the inner rows are freed before the sum allocates its own; early, as the
    # kernel before is that of the gated product
    terms = weighted_gemm(
        gated_gemm(normed, slots, weights.shape[1], w1, ends), w2, ends, slots, weights, early=True
    )
    if get_tensor_model_parallel_world_size() == 1:
        add_terms(x, terms)
    else:
        scratch.expect("summed over ranks", 2 * len(x) * row_bytes)
        x.add_(tensor_model_parallel_all_reduce(sum_terms(terms)))

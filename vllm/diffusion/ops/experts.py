# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: every row is processed by a few of several gated MLPs.

The rows are sorted by expert, and each expert multiplies only its rows, without padding. A row's
terms are added in ascending order of the expert. Every product and sum is rounded to the model
dtype, as in the public code of LLaDA-MoE, or the sum is computed in fp32 (`Scoring.in_fp32`). fp8
matrices are multiplied by fp8 rows, each with its own scale. 4-bit matrices of a layer are
unpacked first, into memory that all layers share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

import gather_gemm
from gather_gemm import SOFTMAX, Routing, Scoring
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.ops import collectives, dispatch
from vllm.diffusion.ops.packed import unpacked
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm_add_llada.cuda_kernels import fused_ops
from vllm_add_llada.cuda_kernels.fused_ops import QuantisedRows

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.stages import Buffers
    from vllm_add_llada.cuda_kernels.fused_ops import Packed

__all__ = [
    "SOFTMAX",
    "DenseExperts",
    "ExpertWeights",
    "PackedExperts",
    "Routing",
    "Scoring",
    "add_experts",
    "route_rows",
]


def route_rows(
    x: Tensor,
    gate: Tensor,
    num_chosen: int,
    bias: Tensor | None = None,
    scoring: Scoring = SOFTMAX,
    *,
    has_shared: bool = False,
    expert_scales: Tensor | None = None,
    is_invariant: bool = False,
) -> Routing:
    """Choose experts for each row by the logits ``x @ gate.T``.

    Args:
        x: [R, D], model dtype.
        gate: [E, D], model dtype; no kernel of a step writes it.
        num_chosen: k, from 1 to E.
        bias: [E] fp32, added to the scores only for the choice.
        scoring: conversion of logits to a choice and weights; with windows, the first row begins a
            window.
        has_shared: whether all rows have one more expert, see `Routing`.
        expert_scales: [E] fp32, factors of the weights of each expert, applied last.
        is_invariant: whether one kernel serves any number of rows, so that its sums have one order.
    """
    is_compiled = dispatch.routes_compiled(len(x), len(gate)) and scoring.is_compiled
    is_compiled = is_compiled and not has_shared and expert_scales is None and not is_invariant
    if is_compiled and fused_ops.has_router(x, gate):
        return Routing(*fused_ops.route_rows(x, gate, num_chosen, bias, **scoring.of_rows()))
    in_parts = is_invariant or dispatch.routes_in_parts(len(x), dispatch.card_of(x.device))
    options: Any = {"has_shared": has_shared, "in_parts": in_parts, "expert_scales": expert_scales}
    return gather_gemm.route_rows(x, gate, num_chosen, bias, scoring, **options)


class DenseExperts(NamedTuple):
    """Unpacked matrices of all experts, one each.

    Attributes:
        values: [E, N, K], model dtype or fp8.
        scales: [E, N] fp32, factors of the rows of an fp8 matrix.
    """

    values: Tensor
    scales: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return len(self.values)

    @property
    def depth(self) -> int:
        return self.values.shape[2]

    @property
    def quantises(self) -> bool:
        """Whether the rows to multiply are quantised to fp8."""
        return self.scales is not None


class PackedExperts(NamedTuple):
    """Matrices of all experts, one each, in 4 bits.

    Attributes:
        packed: [E * N, K].
    """

    packed: Packed
    num_experts: int

    @property
    def depth(self) -> int:
        return self.packed.shape[1]

    @property
    def quantises(self) -> bool:
        """False, because rows are multiplied in the model dtype."""
        return False


ExpertWeights: TypeAlias = DenseExperts | PackedExperts


def check_invariant(*weights: ExpertWeights) -> None:
    """Refuse matrices on a GPU for which the kernel for any number of rows does not exist.

    Raises:
        ServerConfigError: there are such matrices.
    """
    for some in weights:
        assert isinstance(some, DenseExperts)
        values = some.values
        if values.is_cuda and not fused_ops.has_grouped_gemm(values[0, :1], values):
            raise ServerConfigError(
                f"batch_invariant: given experts of {values.dtype} {list(values.shape[1:])}; "
                "wanted bfloat16 and sizes that are multiples of 16"
            )


def _matrices(weights: ExpertWeights, like: Tensor) -> DenseExperts:
    """Return the matrices in a dtype that products support; 4-bit matrices are unpacked.

    The next call that unpacks overwrites the memory.
    """
    if isinstance(weights, DenseExperts):
        return weights
    return DenseExperts(
        unpacked((weights.packed,), like.dtype).unflatten(0, (weights.num_experts, -1))
    )


def gated_products(
    x: Tensor,
    w1: DenseExperts,
    routing: Routing,
    *,
    is_gelu: bool = False,
    is_invariant: bool = False,
) -> Tensor:
    """Compute silu(gate) * up [R * k, I] of each row x [R, D] with its experts w1 [E, 2I, D].

    With `is_gelu`, gelu in its tanh form takes the place of silu. With `is_invariant`, the compiled
    kernel serves any number of rows, because its sums have one order.
    """
    (matrices, scales), (weights, slots, ends) = w1, routing
    rows = _rows_for(w1, x)
    args = slots, weights.shape[1], matrices, ends, scales
    streams = scales is not None or dispatch.streams_gated(len(slots), len(matrices))
    streams = streams or is_invariant
    if streams and fused_ops.has_grouped_gemm(rows, matrices):
        return fused_ops.gated_gemm(rows, *args, is_gelu=is_gelu)
    return gather_gemm.gated_gemm(_widened(rows, x), *args, is_gelu=is_gelu)


def weighted_terms(
    inner: Tensor,
    w2: DenseExperts,
    routing: Routing,
    *,
    is_weighted: bool = True,
    early: bool = True,
    is_invariant: bool = False,
) -> Tensor:
    """Compute the terms [R, k, D] of each row: the experts' second products, weighted.

    Args:
        inner: [R * k, I], the result of `gated_products`.
        w2: [E, D, I].
        routing: the rows' experts.
        is_weighted: whether products are multiplied by the rows' weights.
        early: whether w2 and the routing may be read before the previous kernel ends. This requires
            that `gated_products` ran directly before, and that no kernel of a step writes w2.
        is_invariant: as for `gated_products`.
    """
    (matrices, scales), (weights, slots, ends) = w2, routing
    rows = _rows_for(w2, inner)
    args = matrices, ends, slots, weights
    streams = scales is not None or dispatch.streams_weighted(len(inner), len(matrices))
    streams = streams or is_invariant
    if streams and fused_ops.has_grouped_gemm(rows, matrices):
        multiply = fused_ops.weighted_gemm
        return multiply(rows, *args, is_weighted=is_weighted, early=early, weight_scales=scales)
    wide, early = _widened(rows, inner), early and scales is None
    return gather_gemm.weighted_gemm(
        wide, *args, is_weighted=is_weighted, early=early, weight_scales=scales
    )


def _rows_for(matrices: DenseExperts, x: Tensor) -> Tensor | QuantisedRows:
    """Return the rows x in the dtype in which the matrices are multiplied."""
    if not matrices.quantises:
        return x
    values = torch.empty(x.shape, dtype=fused_ops.FP8, device=x.device)
    rows = QuantisedRows(values, torch.empty(len(x), dtype=torch.float32, device=x.device))
    fused_ops.quantise_rows(x, rows)
    return rows


def _widened(rows: Tensor | QuantisedRows, like: Tensor) -> Tensor:
    """Convert quantised rows to the dtype of `like`, for kernels without fp8 support."""
    if not isinstance(rows, QuantisedRows):
        return rows
    return (rows.values.float() * rows.scales[:, None]).to(like.dtype)


def expert_terms(
    normed: Tensor,
    routing: Routing,
    w1: ExpertWeights,
    w2: ExpertWeights,
    *,
    is_weighted: bool,
    is_gelu: bool = False,
    is_invariant: bool = False,
) -> Tensor:
    """Compute this rank's part of the terms [R, k, D] of rows; arguments as in `add_experts`.

    `is_weighted` states whether they are multiplied by the rows' weights.
    """
    first = _matrices(w1, normed)
    inner = gated_products(normed, first, routing, is_gelu=is_gelu, is_invariant=is_invariant)
    options: Any = {"early": isinstance(w2, DenseExperts), "is_invariant": is_invariant}
    return weighted_terms(inner, _matrices(w2, normed), routing, is_weighted=is_weighted, **options)


def add_experts(
    x: Tensor,
    normed: Tensor,
    routing: Routing,
    w1: ExpertWeights,
    w2: ExpertWeights,
    scratch: Buffers,
    *,
    addend: Tensor | None = None,
    in_fp32: bool = False,
    has_shared: bool = False,
    is_gelu: bool = False,
    is_invariant: bool = False,
) -> None:
    """Add, in place, the sum of weight * expert(normed) over the chosen experts to x.

    If the experts' width is sharded, the result is summed over the ranks. Launches depend only on
    shapes, so a captured CUDA graph is valid for any routing.

    Args:
        x: [R, D], model dtype.
        normed: [R, D], model dtype; not x.
        routing: the rows' experts, from `route_rows`.
        w1: [E, 2I, D], the gate's rows first.
        w2: [E, D, I].
        scratch: memory for this rank's part of a sum over several ranks.
        addend: [R, D], model dtype, contiguous: this rank's part of an addend of that sum.
        in_fp32: whether terms are weighted by fp32 weights, added in fp32, and rounded once.
        has_shared: whether the addend is the last term, from a shared expert.
        is_gelu: whether experts have gelu in its tanh form instead of silu.
        is_invariant: whether no row's result depends on other rows.
    """
    weights = routing.weights
    kind: Any = {"is_gelu": is_gelu, "is_invariant": is_invariant}
    terms = expert_terms(normed, routing, w1, w2, is_weighted=not in_fp32, **kind)
    if has_shared:
        terms, addend, weights = terms[:, :-1], terms[:, -1], weights[:, :-1]
    late_weights = weights if in_fp32 else None
    if get_tensor_model_parallel_world_size() == 1:
        gather_gemm.sum_terms(terms, late_weights, addend, out=x, adds=True)
        return

    def write(rows: slice, out: Tensor) -> None:
        some = None if late_weights is None else late_weights[rows]
        rest = None if addend is None else addend[rows]
        gather_gemm.sum_terms(terms[rows], some, rest, out=out)

    collectives.tensor_parallel().add_sum(x, write, scratch)

# SPDX-License-Identifier: Apache-2.0
"""Routing of rows to experts, the order of the rows by expert, and the sum of their terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from ._ops import _check, _check_exact
from ._triton import can_take, guard, load_kernels
from .scoring import SOFTMAX, Scoring

if TYPE_CHECKING:
    from types import ModuleType

_kernels = load_kernels("routing_kernel")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_EXPERTS = 1024  # a program of the kernel holds whole rows


class Routing(NamedTuple):
    """Routing of rows to their experts. A slot is a row's place for one of its k terms.

    With `has_shared`, all rows share one more expert. It is the first of E + 1 experts, has the
    weight 1, and takes the last of the k + 1 places of a row. Then E and k below mean E + 1 and k +
    1.

    Attributes:
        weights: [R, k], weights of a row's experts, in ascending order of experts.
        slots: int32 [R * k]: row * k + index among the row's experts, sorted by expert, and by
            row within an expert.
        ends: int32 [E], the end of each expert's part of `slots`.
    """

    weights: Tensor
    slots: Tensor
    ends: Tensor


def route(
    logits: Tensor,
    num_chosen: int,
    bias: Tensor | None = None,
    scoring: Scoring = SOFTMAX,
    *,
    has_shared: bool = False,
    expert_scales: Tensor | None = None,
) -> Routing:
    """Choose experts for each row by their scores in fp32.

    By default the weights are the probabilities of the chosen experts, not normalised to sum 1.
    Ties go to the lowest expert, or the lowest group of experts. On CUDA one kernel runs for few
    rows and two for many. PyTorch runs for windows of more than 16,384 scores. Launches depend on
    shapes alone, and the result does not depend on the order in which blocks run.

    Args:
        logits: [R, E] bf16, fp16 or fp32, E at most 1,024; rows may be strided.
        num_chosen: k, from 1 to E.
        bias: fp32 [E], added to the scores for the choice only.
        scoring: conversion of logits to a choice and weights. The groups that it keeps must have
            at least k experts in total, and every group at least two. With windows, the first row
            starts a window.
        has_shared: whether all rows have one more expert.
        expert_scales: fp32 [E], factors of the weights of each expert, applied last.

    Returns:
        weights in the dtype of the logits.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    _check_logits(logits)
    of_experts = (bias, expert_scales)
    _check_choice("route", logits.shape[1], num_chosen, *of_experts, logits, scoring)
    kernels = _kernels_for(logits, logits.shape[1], scoring)
    if kernels is None:
        options: Any = {"has_shared": has_shared, "expert_scales": expert_scales}
        return Routing(*reference.route(logits, num_chosen, bias, scoring, **options))
    routing = _allocate(logits, logits.shape[1], num_chosen, logits.dtype, has_shared=has_shared)
    with guard(logits):
        kernels.launch_route(logits, num_chosen, *of_experts, scoring, *routing)
    return routing


def route_rows(
    x: Tensor,
    gate: Tensor,
    num_chosen: int,
    bias: Tensor | None = None,
    scoring: Scoring = SOFTMAX,
    *,
    has_shared: bool = False,
    in_parts: bool = True,
    expert_scales: Tensor | None = None,
) -> Routing:
    """Choose experts by the logits ``x @ gate.T``, rounded to the dtype unless `Scoring.in_fp32`.

    Sums are fp32.

    Args:
        x: [R, D] bf16, fp16 or fp32; rows may be strided, D is contiguous.
        gate: [E, D] of the same dtype, E at most 1,024, with the same strides allowed. It may be
            read before the previous kernel of the stream ends, so that kernel must not write it.
        num_chosen: k, from 1 to E.
        bias, scoring, has_shared, expert_scales: as for `route`.
        in_parts: on CUDA, for 16-bit dtypes, a kernel computes the product in parts of the depth,
            which suits few rows, and the kernel that chooses adds the parts. Otherwise PyTorch
            computes the product.

    Returns:
        weights in the dtype of x, or fp32.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    op = "route_rows"
    _check(op, "x", x, x, (-1, -1))
    _check(op, "gate", gate, x, (-1, x.shape[1]))
    _check_choice(op, len(gate), num_chosen, bias, expert_scales, x, scoring)
    has_parts = in_parts and x.element_size() == 2 and x.numel() > 0
    kernels = _kernels_for(x, len(gate), scoring) if has_parts else None
    if kernels is None:
        logits = _router_logits(x, gate, scoring)
        options: Any = {"has_shared": has_shared, "expert_scales": expert_scales}
        return route(logits, num_chosen, bias, scoring, **options)
    dtype = torch.float32 if scoring.in_fp32 else x.dtype
    routing = _allocate(x, len(gate), num_chosen, dtype, has_shared=has_shared)
    with guard(x):
        parts = kernels.launch_score(x, gate)
        kernels.launch_route(parts, num_chosen, bias, expert_scales, scoring, *routing)
    return routing


def _kernels_for(rows: Tensor, num_experts: int, scoring: Scoring) -> ModuleType | None:
    """Return the kernels if they support this choice, else None.

    They do not support zero rows, or a window that does not fit into a program.
    """
    if _kernels is None or not can_take(rows) or len(rows) == 0:
        return None
    return _kernels if _kernels.holds_window(num_experts, scoring.window) else None


def _router_logits(x: Tensor, gate: Tensor, scoring: Scoring) -> Tensor:
    """Compute ``x @ gate.T`` [R, E] in PyTorch, in fp32 if `Scoring.in_fp32`."""
    if not scoring.in_fp32 or x.dtype == torch.float32:
        return torch.mm(x, gate.t())
    if x.is_cuda:  # The products of 16-bit numbers are exact in fp32.
        return torch.mm(x, gate.t(), out_dtype=torch.float32)
    return torch.mm(x.to(torch.float32), gate.to(torch.float32).t())


def _allocate(
    rows: Tensor, num_experts: int, num_chosen: int, dtype: torch.dtype, *, has_shared: bool
) -> Routing:
    weights = rows.new_empty(len(rows), num_chosen + has_shared, dtype=dtype)
    slots, ends = weights.numel(), num_experts + has_shared
    return Routing(
        weights,
        torch.empty(slots, dtype=torch.int32, device=rows.device),
        torch.empty(ends, dtype=torch.int32, device=rows.device),
    )


def sum_terms(
    terms: Tensor,
    weights: Tensor | None = None,
    addend: Tensor | None = None,
    out: Tensor | None = None,
    *,
    adds: bool = False,
) -> Tensor:
    """Sum each row's terms, first to last.

    Without weights every sum is rounded to the dtype. With weights the terms are weighted and added
    in fp32, and the total is rounded once. The addend is added last, and that sum is rounded as
    well.

    Args:
        terms: [R, k, D] bf16, fp16 or fp32; the terms of a row are contiguous.
        weights: fp32 [R, k], or None; rows may be strided.
        addend: [R, D] of the dtype of the terms, or None; rows may be strided.
        out: Like the addend, written; allocated when not given.
        adds: Whether the sum is added to `out`, which must be given.

    Returns:
        [R, D].

    Raises:
        ValueError: An argument is not as above.
    """
    op = "sum_terms"
    if terms.dim() != 3 or terms.dtype not in _DTYPES or not terms[:1].is_contiguous():
        raise ValueError(
            f"{op}: terms must be [R, k, D] of one of bf16, fp16 and fp32 with contiguous rows, "
            f"got {terms.dtype} {list(terms.shape)} with strides {terms.stride()}"
        )
    num_rows, num_terms, num_columns = terms.shape
    if num_terms == 0:
        raise ValueError(f"{op}: terms must have at least one term a row, got {list(terms.shape)}")
    if weights is not None:
        shape = (num_rows, num_terms)
        _check_exact(op, "weights", weights, shape, terms, torch.float32, rows_apart=True)
    out = terms.new_empty(num_rows, num_columns) if out is None else out
    for name, tensor in (("addend", addend), ("out", out)):
        if tensor is not None:
            _check_exact(op, name, tensor, (num_rows, num_columns), terms, rows_apart=True)
    if _kernels is None or not can_take(terms) or terms.numel() == 0:
        total = reference.sum_terms(terms, weights, addend)
        return out.add_(total) if adds else out.copy_(total)
    with guard(terms):
        _kernels.launch_sum(terms, weights, addend, out, adds=adds)
    return out


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype not in _DTYPES:
        raise ValueError(
            f"route: logits must be [R, E] of one of bf16, fp16 and fp32, "
            f"got {logits.dtype} {list(logits.shape)}"
        )
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"route: the columns of logits must be contiguous, got strides {logits.stride()}"
        )


def _check_choice(
    op: str,
    num_experts: int,
    num_chosen: int,
    bias: Tensor | None,
    expert_scales: Tensor | None,
    like: Tensor,
    scoring: Scoring,
) -> None:
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{op}: wanted E at most {MAX_EXPERTS}, got {num_experts}")
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(f"{op}: num_chosen must be from 1 to {num_experts}, got {num_chosen}")
    if scoring.num_groups > 1:
        size, rest = divmod(num_experts, scoring.num_groups)
        kept = scoring.num_kept_groups
        if rest or size < 2 or not num_chosen <= kept * size <= num_experts:
            raise ValueError(
                f"{op}: scoring must keep groups of at least {num_chosen} of {num_experts} experts "
                f"that lie in groups of two or more, got {kept} of {scoring.num_groups} groups"
            )
    if scoring.window and not num_chosen <= scoring.capacity <= num_experts:
        raise ValueError(
            f"{op}: the capacity of a window must be from {num_chosen} to {num_experts}, "
            f"got {scoring.capacity}"
        )
    for name, numbers in (("bias", bias), ("expert_scales", expert_scales)):
        if numbers is not None:
            _check_exact(op, name, numbers, (num_experts,), like, torch.float32)

# SPDX-License-Identifier: Apache-2.0
"""Which experts a row goes to, the order in which rows reach them, and the sum of their terms."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import grouped_reference as reference
from ._triton import can_take, guard, load_kernels

_kernels = load_kernels("routing_kernel")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_EXPERTS = 1024  # a block of the kernel holds whole rows


class Routing(NamedTuple):
    """Rows on their way to their experts. A slot is a row's place for one of its k terms.

    Attributes:
        weights: [R, k] in the dtype of the logits, of a row's experts in ascending order.
        slots: int32 [R * k]: row * k + place among the row's experts, sorted by expert, and by
            row within an expert.
        ends: int32 [E], the end of each expert's part of `slots`.
    """

    weights: Tensor
    slots: Tensor
    ends: Tensor


def route(logits: Tensor, num_chosen: int, bias: Tensor | None = None) -> Routing:
    """Choose experts for each row by a softmax over all of them in fp32.

    The weights are the probabilities of the chosen experts as they are: they do not sum to 1.
    Among equals the lowest expert is chosen. On CUDA one kernel for few rows and two for many,
    launched from shapes alone; the result does not depend on the order in which blocks run.

    Args:
        logits: [R, E] bf16, fp16 or fp32, E at most 1,024; rows may be strided.
        num_chosen: k, from 1 to E.
        bias: fp32 [E], added to the probabilities for the choice only.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    _check_logits(logits, num_chosen, bias)
    num_rows, num_experts = logits.shape
    if _kernels is None or not can_take(logits) or num_rows == 0:
        return Routing(*reference.route(logits, num_chosen, bias))
    routing = Routing(
        logits.new_empty(num_rows, num_chosen),
        torch.empty(num_rows * num_chosen, dtype=torch.int32, device=logits.device),
        torch.empty(num_experts, dtype=torch.int32, device=logits.device),
    )
    with guard(logits):
        _kernels.launch_route(logits, num_chosen, bias, *routing)
    return routing


def sum_terms(terms: Tensor) -> Tensor:
    """The sum of each row's terms, first to last, every sum rounded to the dtype.

    Args:
        terms: [R, k, D] bf16, fp16 or fp32, contiguous.

    Returns:
        [R, D].

    Raises:
        ValueError: `terms` is not as above.
    """
    _check_terms("sum_terms", terms)
    if _kernels is None or not can_take(terms) or terms.numel() == 0:
        return reference.sum_terms(terms)
    out = terms.new_empty(terms.shape[0], terms.shape[2])
    with guard(terms):
        _kernels.launch_sum(terms, out, adds=False)
    return out


def add_terms(x: Tensor, terms: Tensor) -> None:
    """x += `sum_terms`, in place.

    Args:
        x: [R, D] of the dtype of the terms; rows may be strided, D is contiguous.
        terms: [R, k, D], as for `sum_terms`.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    _check_terms("add_terms", terms)
    wanted = (terms.shape[0], terms.shape[2])
    is_like = x.dtype == terms.dtype and x.device == terms.device
    if x.shape != wanted or not is_like or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(
            f"add_terms: x must be {list(wanted)} of {terms.dtype} on {terms.device} with "
            f"contiguous columns, got {x.dtype} {list(x.shape)} on {x.device} with "
            f"strides {x.stride()}"
        )
    if _kernels is None or not can_take(terms) or terms.numel() == 0:
        x.add_(reference.sum_terms(terms))
        return
    with guard(terms):
        _kernels.launch_sum(terms, x, adds=True)


def _check_logits(logits: Tensor, num_chosen: int, bias: Tensor | None) -> None:
    if logits.dim() != 2 or logits.dtype not in _DTYPES or logits.shape[1] > MAX_EXPERTS:
        raise ValueError(
            f"route: logits must be [R, E] of one of bf16, fp16 and fp32 with E at most "
            f"{MAX_EXPERTS}, got {logits.dtype} {list(logits.shape)}"
        )
    num_experts = logits.shape[1]
    if num_experts > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"route: the columns of logits must be contiguous, got strides {logits.stride()}"
        )
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(f"route: num_chosen must be from 1 to {num_experts}, got {num_chosen}")
    if bias is None:
        return
    is_like = bias.dtype == torch.float32 and bias.device == logits.device
    if bias.shape != (num_experts,) or not is_like or not bias.is_contiguous():
        raise ValueError(
            f"route: bias must be fp32 [{num_experts}] contiguous on {logits.device}, "
            f"got {bias.dtype} {list(bias.shape)} on {bias.device}"
        )


def _check_terms(op: str, terms: Tensor) -> None:
    if terms.dim() != 3 or terms.dtype not in _DTYPES or not terms.is_contiguous():
        raise ValueError(
            f"{op}: terms must be [R, k, D] contiguous of one of bf16, fp16 and fp32, "
            f"got {terms.dtype} {list(terms.shape)} with strides {terms.stride()}"
        )
    if terms.shape[1] == 0:
        raise ValueError(f"{op}: terms must have at least one term a row, got {list(terms.shape)}")

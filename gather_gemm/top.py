# SPDX-License-Identifier: Apache-2.0
"""The product of gathered rows and the output matrix, sampled tile by tile and never stored."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from ._ops import _check, _is_interpreted, _kernel
from .launch import TopConfig, choose_top_config

MAX_EXCLUDED = 16  # each is compared with every column


class Top(NamedTuple):
    """Partial softmax of the rows of a product; slices of the columns merge exactly.

    Attributes:
        maximum: fp32 [R], the largest logit.
        column: int64 [R], the lowest column that has it.
        sum_exp: fp32 [R], sum of exp(logit - maximum) over the columns that are not excluded.
        probability: fp32 [R], of the best column where these are all columns: 1 / sum_exp, and 0
            where the column is excluded or no logit is finite.
    """

    maximum: Tensor
    column: Tensor
    sum_exp: Tensor
    probability: Tensor


def is_top_faster(x: Tensor, num_rows: int, weight: Tensor) -> bool:
    """Whether `gather_top` was measured faster than storing the product and sampling from it.

    It was for up to 128 rows of bf16 and fp16 on cards of compute capability 9.0; see `launch`.
    """
    return (
        _kernel is not None
        and not _is_interpreted()
        and x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and choose_top_config(num_rows) is not None
        and _is_describable(weight)
    )


def gather_top(
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    *,
    excluded: Sequence[int] = (),
    config: TopConfig | None = None,
) -> Top:
    """Best column of each gathered row of ``x @ weight.T``, and what its probability needs.

    The columns are multiplied tile by tile; a tile's logits are rounded to the dtype of x, as the
    stored product would be, and leave only their maximum, its lowest column and the sum of
    exponentials (online softmax, Milakov and Gimelshein, arXiv:1805.02867). The tiles of a row
    are merged in one order, so a row's result does not depend on the rows beside it as long as
    their number chooses the same tile. On CUDA, and under Triton's interpreter, a Triton kernel;
    else the reference, which stores the product.

    Args:
        x: [T, D] bf16, fp16 or fp32; rows may be strided, D is contiguous.
        rows: int64 [R], each in [0, T); in any order, repeats allowed, not checked; None takes
            all rows as they are.
        weight: [N, D] of the same dtype; rows may be strided, D is contiguous. The kernel wants
            rows on whole 16 bytes.
        excluded: at most 16 columns that are left out of the sum, and still may be the best.
        config: tile of the kernel; by default the one measured best for the number of rows.

    Returns:
        Top of the R rows. A row without a finite logit has column 0 and sum 0; NaN in a row makes
        its sum NaN, and its column is then in range and otherwise unspecified.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    op = "gather_top"
    _check(op, "x", x, x, (-1, -1))
    _check(op, "weight", weight, x, (-1, x.shape[1]))
    if len(weight) == 0:
        raise ValueError(f"{op}: weight must have at least one row, got {list(weight.shape)}")
    if rows is not None and (
        rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != x.device
    ):
        raise ValueError(
            f"{op}: rows must be int64 [R] on {x.device}, "
            f"got {rows.dtype} {list(rows.shape)} on {rows.device}"
        )
    if len(excluded) > MAX_EXCLUDED or any(not 0 <= c < len(weight) for c in excluded):
        raise ValueError(
            f"{op}: excluded must be at most {MAX_EXCLUDED} columns in [0, {len(weight)}), "
            f"got {list(excluded)}"
        )
    num_rows = len(x) if rows is None else len(rows)
    if num_rows == 0 or not _has_kernel(x, weight):
        return Top(*reference.gather_top(x, rows, weight, excluded))
    maximum, sum_exp, probability = torch.empty(3, num_rows, dtype=torch.float32, device=x.device)
    column = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    top = Top(maximum, column, sum_exp, probability)
    assert _kernel is not None
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _kernel.launch_top(
            x,
            None if rows is None else rows.contiguous(),
            weight,
            tuple(excluded),
            top,
            config or choose_top_config(num_rows) or choose_top_config(128),
        )
    return top


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    if _kernel is None or not _is_describable(weight):
        return False
    if _is_interpreted():
        # The interpreter's dot product takes the bit patterns of bf16 for integers.
        return x.dtype != torch.bfloat16
    return x.is_cuda and x.dtype != torch.float32


def _is_describable(weight: Tensor) -> bool:
    """Whether the copy engine can read tiles of the matrix: its rows lie on whole 16 bytes."""
    bytes_apart = weight.stride(0) * weight.element_size()
    return weight.data_ptr() % 16 == 0 and bytes_apart % 16 == 0

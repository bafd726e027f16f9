# SPDX-License-Identifier: Apache-2.0
"""Product of gathered rows and the output matrix, sampled tile by tile and never stored."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from ._ops import _check, _kernels, _num_rows
from ._triton import can_take, guard
from .launch import TopConfig, choose_top_config

MAX_COLUMNS = 4  # special columns, each of which is an argument of the kernel


class Top(NamedTuple):
    """Partial softmax of the rows of a product; slices of the columns merge exactly.

    Attributes:
        maximum: fp32 [R], the largest logit.
        column: int64 [R], the lowest column with the largest logit.
        sum_exp: fp32 [R], sum of exp(logit - maximum) over the columns that are not excluded.
        probability: fp32 [R], probability of the best column if there are no other slices:
            1 / sum_exp, and 0 if the column is excluded or no logit is finite.
    """

    maximum: Tensor
    column: Tensor
    sum_exp: Tensor
    probability: Tensor


def has_top(x: Tensor, weight: Tensor) -> bool:
    """Whether `gather_top` has a kernel for these tensors; otherwise it stores the product."""
    if _kernels is None or not can_take(x) or not _is_describable(weight):
        return False
    return not x.is_cuda or x.dtype != torch.float32


def gather_top(
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    *,
    columns: Sequence[int] = (),
    forbidden: int | Tensor = 0,
    excluded: int | Tensor = 0,
    config: TopConfig | None = None,
) -> Top:
    """Find the best column of each gathered row of ``x @ weight.T``, and its probability.

    The columns are multiplied tile by tile. A tile's logits are rounded to the dtype of x, as the
    stored product would be. Of a tile only the maximum, its lowest column and the sum of
    exponentials are kept (online softmax, Milakov and Gimelshein, arXiv:1805.02867). The tiles of a
    row are merged in a fixed order. So a row's result does not depend on the other rows, as long as
    their number selects the same tile. A Triton kernel runs on CUDA, and under Triton's
    interpreter. Otherwise the reference runs, which stores the product.

    Args:
        x: [T, D] bf16, fp16 or fp32; rows may be strided, D is contiguous.
        rows: int64 [R], each in [0, T); in any order, repeats allowed, not checked; None takes
            all rows in order.
        weight: [N, D] of the same dtype; rows may be strided, D is contiguous. The kernel requires
            rows that start on 16 bytes.
        columns: at most 4 columns, to which the masks below refer.
        forbidden: a number, or int32 [R]; bit i set: ``columns[i]`` reads as -inf.
        excluded: a number, or int32 [R]; bit i set: ``columns[i]`` is left out of the sum, but may
            still be the best column.
        config: tile of the kernel; by default the one measured best for the number of rows.

    Returns:
        Top of the R rows. A row without a finite logit has column 0 and sum 0. NaN in a row makes
        its sum NaN; its column is then in range, but otherwise unspecified.

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    num_rows = _check_top(x, rows, weight, columns, forbidden, excluded)
    if num_rows == 0 or not has_top(x, weight):
        return Top(*reference.gather_top(x, rows, weight, columns, forbidden, excluded))
    maximum, sum_exp, probability = torch.empty(3, num_rows, dtype=torch.float32, device=x.device)
    column = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    top = Top(maximum, column, sum_exp, probability)
    assert _kernels is not None
    with guard(x):
        _kernels.launch_top(
            x,
            None if rows is None else rows.contiguous(),
            weight,
            (*columns, *[-1] * (MAX_COLUMNS - len(columns))),
            forbidden,
            excluded,
            top,
            config or choose_top_config(num_rows),
        )
    return top


def _check_top(
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    columns: Sequence[int],
    forbidden: int | Tensor,
    excluded: int | Tensor,
) -> int:
    """Check the arguments of `gather_top` and return R."""
    op = "gather_top"
    _check(op, "x", x, x, (-1, -1))
    _check(op, "weight", weight, x, (-1, x.shape[1]))
    if len(weight) == 0:
        raise ValueError(f"{op}: weight must have at least one row, got {list(weight.shape)}")
    if len(columns) > MAX_COLUMNS or any(not 0 <= c < len(weight) for c in columns):
        raise ValueError(
            f"{op}: columns must be at most {MAX_COLUMNS} columns in [0, {len(weight)}), "
            f"got {list(columns)}"
        )
    num_rows = _num_rows(op, x, rows)
    for name, mask in (("forbidden", forbidden), ("excluded", excluded)):
        if not isinstance(mask, Tensor):
            continue
        is_like = mask.dtype == torch.int32 and mask.device == x.device
        if mask.shape != (num_rows,) or not is_like or not mask.is_contiguous():
            raise ValueError(
                f"{op}: {name} must be a number or int32 [{num_rows}] contiguous on {x.device}, "
                f"got {mask.dtype} {list(mask.shape)} on {mask.device}"
            )
    return num_rows


def _is_describable(weight: Tensor) -> bool:
    """Whether the copy engine can read tiles of the matrix: its rows start on 16 bytes."""
    bytes_apart = weight.stride(0) * weight.element_size()
    return weight.data_ptr() % 16 == 0 and bytes_apart % 16 == 0

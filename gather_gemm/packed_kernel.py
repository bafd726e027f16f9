# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernel that makes a matrix of 4-bit numbers plain: a group of some rows a program."""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
_NUM_WARPS = 4


@triton.jit
def unpack_kernel(
    values,  # uint8 [N, K / 2]
    scales,  # fp32 [N, K / G]
    zeros,  # uint8 [N, K / G], or None
    table,  # fp32 [16], or None
    out,  # [N, K]
    num_rows,
    half,
    values_stride,
    scales_stride,
    out_stride,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1)
    bytes_ = tl.arange(0, HALF)
    is_row = rows < num_rows
    mask = is_row[:, None] & (bytes_ < half)[None, :]
    wide_rows = rows.to(tl.int64)
    place = values + wide_rows[:, None] * values_stride + group * half + bytes_[None, :]
    pair = tl.load(place, mask=mask, other=0)
    low, high = (pair & 15).to(tl.int32), (pair >> 4).to(tl.int32)
    scale = tl.load(scales + wide_rows * scales_stride + group, mask=is_row, other=0.0)[:, None]
    if table is not None:
        low, high = tl.load(table + low), tl.load(table + high)
    else:
        zero = tl.load(zeros + wide_rows * scales_stride + group, mask=is_row, other=0)
        zero = zero.to(tl.float32)[:, None]
        low, high = low.to(tl.float32) - zero, high.to(tl.float32) - zero
    target = out + wide_rows[:, None] * out_stride + group * 2 * half + bytes_[None, :]
    tl.store(target, (low * scale).to(out.dtype.element_ty), mask=mask)
    tl.store(target + half, (high * scale).to(out.dtype.element_ty), mask=mask)


def launch_unpack(
    values: Tensor, scales: Tensor, zeros: Tensor | None, table: Tensor | None, out: Tensor
) -> None:
    """Enqueue the unpacking; the arguments are checked."""
    num_rows, num_groups = scales.shape
    half = values.shape[1] // num_groups
    unpack_kernel[(triton.cdiv(num_rows, _ROWS), num_groups)](
        values,
        scales,
        zeros,
        table,
        out,
        num_rows,
        half,
        values.stride(0),
        scales.stride(0),
        out.stride(0),
        ROWS=_ROWS,
        HALF=triton.next_power_of_2(half),
        num_warps=_NUM_WARPS,
    )

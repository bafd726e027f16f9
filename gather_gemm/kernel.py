# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the gather-GEMM and of the product that is sampled tile by tile."""

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import LaunchConfig, TopConfig, power_of_two


# Row counts change often, so there is no specialised kernel for 1 row or for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def gather_gemm_kernel(
    x,  # [T, D]
    rows,  # [R] int64, or None when not GATHERED
    weight,  # [N, D]
    out,  # [R, N]
    num_rows,
    num_columns,
    depth,
    x_stride,
    weight_stride,
    out_stride,
    GATHERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    # Row blocks are the fast axis, so that programs that run at the same time share a tile of the
    # weight.
    row_ids = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column_ids = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    depth_ids = tl.arange(0, BLOCK_DEPTH)
    row_mask = row_ids < num_rows
    column_mask = column_ids < num_columns
    # Offsets are 64-bit, because x and out of long sequences have more than 2^31 elements.
    x_ids = row_ids.to(tl.int64)
    if GATHERED:
        x_ids = tl.load(rows + row_ids, mask=row_mask, other=0).to(tl.int64)
    x_rows = x + x_ids[:, None] * x_stride
    weight_rows = weight + column_ids.to(tl.int64)[None, :] * weight_stride
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, depth, BLOCK_DEPTH):
        depth_mask = start + depth_ids < depth
        left = tl.load(
            x_rows + (start + depth_ids)[None, :],
            mask=row_mask[:, None] & depth_mask[None, :],
            other=0.0,
        )
        right = tl.load(
            weight_rows + (start + depth_ids)[:, None],
            mask=depth_mask[:, None] & column_mask[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total, input_precision=INPUT_PRECISION)
    tl.store(
        out + row_ids.to(tl.int64)[:, None] * out_stride + column_ids[None, :],
        total.to(out.dtype.element_ty),
        mask=row_mask[:, None] & column_mask[None, :],
    )


def launch(
    x: Tensor, rows: Tensor | None, weight: Tensor, out: Tensor, config: LaunchConfig
) -> None:
    """Enqueue ``out = x[rows] @ weight.T`` on the current stream; the arguments are checked."""
    num_rows, num_columns = out.shape
    grid = (
        ceil(num_rows / config.block_rows),
        ceil(num_columns / config.block_columns),
    )
    gather_gemm_kernel[grid](
        x,
        rows,
        weight,
        out,
        num_rows,
        num_columns,
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        GATHERED=rows is not None,
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLUMNS=config.block_columns,
        BLOCK_DEPTH=config.block_depth,
        # fp32 inputs keep fp32 products, because tf32 would lose half of their bits.
        INPUT_PRECISION="ieee",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def _hide(logits, column_ids, bits, c0, c1, c2, c3):
    """Set to -inf the columns c of logits [ROWS, COLUMNS] whose bit is set in bits [ROWS]."""
    bits = bits[:, None]
    logits = tl.where((column_ids == c0)[None, :] & ((bits & 1) != 0), -float("inf"), logits)
    logits = tl.where((column_ids == c1)[None, :] & ((bits & 2) != 0), -float("inf"), logits)
    logits = tl.where((column_ids == c2)[None, :] & ((bits & 4) != 0), -float("inf"), logits)
    return tl.where((column_ids == c3)[None, :] & ((bits & 8) != 0), -float("inf"), logits)


@triton.jit
def _is_within(column, first, COLUMNS: tl.constexpr):
    return (column >= first) & (column < first + COLUMNS)


_NUMBERS = ["num_rows", "forbidden", "excluded", "has_forbidden_rows", "has_excluded_rows"]
_NUMBERS += ["c0", "c1", "c2", "c3"]
# Slices of one buffer, which start on 16 bytes for some row counts and not for others. They are
# read and written number by number.
_SLICES = ["rows", "maximum", "column", "sum_exp", "forbidden_rows", "excluded_rows"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SLICES)
def top_tiles_kernel(
    x,  # [T, D]
    rows,  # [R] int64, or None when not GATHERED
    weight,  # descriptor of [N, D]
    maximum,  # [R, tiles] fp32
    column,  # [R, tiles] int32
    sum_exp,  # [R, tiles] fp32
    forbidden,  # bit i is set: column ci reads as -inf in all rows
    forbidden_rows,  # [R] int32, the same by row; read if has_forbidden_rows
    has_forbidden_rows,
    excluded,  # the same for columns that the sum leaves out
    excluded_rows,
    has_excluded_rows,
    c0,
    c1,
    c2,
    c3,
    num_rows,
    num_columns,
    depth,
    x_stride,
    num_tiles,
    GATHERED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    # Row blocks are the fast axis, so that programs that run at the same time share a tile of the
    # weight.
    num_row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    row_block = tl.program_id(0) % num_row_blocks
    tile = tl.program_id(0) // num_row_blocks
    row_ids = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_column = tile * BLOCK_COLUMNS
    depth_ids = tl.arange(0, BLOCK_DEPTH)
    row_mask = row_ids < num_rows
    if GATHERED:
        x_ids = tl.load(rows + row_ids, mask=row_mask, other=0).to(tl.int64)
    else:
        x_ids = tl.minimum(row_ids, num_rows - 1).to(tl.int64)
    x_rows = x + x_ids[:, None] * x_stride + depth_ids[None, :]
    # Few rows are the narrow side of the tile, because the tensor cores need at least 64 of the
    # other side.
    if TRANSPOSED:
        total = tl.zeros((BLOCK_COLUMNS, BLOCK_ROWS), dtype=tl.float32)
    else:
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for start in range(0, depth, BLOCK_DEPTH):
        left = tl.load(x_rows + start, mask=(start + depth_ids < depth)[None, :], other=0.0)
        right = weight.load([first_column, start])
        if TRANSPOSED:
            total = tl.dot(right, left.T, total, input_precision=INPUT_PRECISION)
        else:
            total = tl.dot(left, right.T, total, input_precision=INPUT_PRECISION)
    if TRANSPOSED:
        total = total.T
    # Round each logit as the stored product would be, so that ties and sums use the rounded
    # numbers.
    logits = total.to(weight.dtype).to(tl.float32)
    column_ids = first_column + tl.arange(0, BLOCK_COLUMNS)
    logits = tl.where((column_ids < num_columns)[None, :], logits, -float("inf"))
    # Only few tiles contain one of the special columns.
    is_special = _is_within(c0, first_column, BLOCK_COLUMNS)
    is_special |= _is_within(c1, first_column, BLOCK_COLUMNS)
    is_special |= _is_within(c2, first_column, BLOCK_COLUMNS)
    is_special |= _is_within(c3, first_column, BLOCK_COLUMNS)
    if is_special:
        has_own = row_mask & (has_forbidden_rows != 0)
        bits = tl.load(forbidden_rows + row_ids, mask=has_own, other=forbidden)
        logits = _hide(logits, column_ids, bits, c0, c1, c2, c3)
    best = tl.max(logits, axis=1)
    is_best = logits == best[:, None]
    lowest = tl.min(tl.where(is_best, column_ids[None, :], num_columns - 1), axis=1)
    if is_special:
        has_own = row_mask & (has_excluded_rows != 0)
        bits = tl.load(excluded_rows + row_ids, mask=has_own, other=excluded)
        logits = _hide(logits, column_ids, bits, c0, c1, c2, c3)
    shift = tl.where(best == -float("inf"), 0.0, best)
    sums = tl.sum(tl.exp(logits - shift[:, None]), axis=1)
    at = row_ids.to(tl.int64) * num_tiles + tile
    tl.store(maximum + at, best, mask=row_mask)
    tl.store(column + at, lowest, mask=row_mask)
    tl.store(sum_exp + at, sums, mask=row_mask)


@triton.jit(
    do_not_specialize=["excluded", "has_excluded_rows", "c0", "c1", "c2", "c3"],
    do_not_specialize_on_alignment=[
        *("tile_maximum", "tile_column", "tile_sum_exp", "maximum", "column", "sum_exp"),
        *("probability", "excluded_rows"),
    ],
)
def merge_tiles_kernel(
    tile_maximum,  # [R, tiles] fp32
    tile_column,  # [R, tiles] int32
    tile_sum_exp,  # [R, tiles] fp32
    maximum,  # [R] fp32
    column,  # [R] int64
    sum_exp,  # [R] fp32
    probability,  # [R] fp32
    excluded,  # this and the next six arguments: as for top_tiles_kernel
    excluded_rows,
    has_excluded_rows,
    c0,
    c1,
    c2,
    c3,
    num_tiles,
    num_columns,
    BLOCK_TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, BLOCK_TILES)
    mask = tiles < num_tiles
    at = row * num_tiles + tiles
    maxima = tl.load(tile_maximum + at, mask=mask, other=-float("inf"))
    columns = tl.load(tile_column + at, mask=mask, other=0)
    sums = tl.load(tile_sum_exp + at, mask=mask, other=0.0)
    best = tl.max(maxima, axis=0)
    # If the maximum is NaN, no tile equals it.
    lowest = tl.min(tl.where((maxima == best) & mask, columns, num_columns - 1), axis=0)
    shift = tl.where(best == -float("inf"), 0.0, best)
    tl.store(maximum + row, best)
    tl.store(column + row, lowest.to(tl.int64))
    total = tl.sum(sums * tl.exp(maxima - shift), axis=0)
    tl.store(sum_exp + row, total)
    bits = tl.load(excluded_rows + row, mask=has_excluded_rows != 0, other=excluded)
    is_zero = best == -float("inf")
    is_zero |= (lowest == c0) & ((bits & 1) != 0)
    is_zero |= (lowest == c1) & ((bits & 2) != 0)
    is_zero |= (lowest == c2) & ((bits & 4) != 0)
    is_zero |= (lowest == c3) & ((bits & 8) != 0)
    tl.store(probability + row, tl.where(is_zero & (total == total), 0.0, 1.0 / total))


def launch_top(
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    columns: tuple[int, int, int, int],
    forbidden: int | Tensor,
    excluded: int | Tensor,
    top: tuple[Tensor, Tensor, Tensor, Tensor],
    config: TopConfig,
) -> None:
    """Enqueue `gather_top` into `top` on the current stream; the arguments are checked."""
    num_rows, num_columns = len(top[0]), len(weight)
    num_tiles = ceil(num_columns / config.block_columns)
    partials = torch.empty((3, num_rows, num_tiles), dtype=torch.float32, device=x.device)
    tile_columns = partials[1].view(torch.int32)
    top_tiles_kernel[(ceil(num_rows / config.block_rows) * num_tiles,)](
        x,
        rows,
        TensorDescriptor.from_tensor(weight, [config.block_columns, config.block_depth]),
        partials[0],
        tile_columns,
        partials[2],
        *_mask(forbidden, tile_columns),
        *_mask(excluded, tile_columns),
        *columns,
        num_rows,
        num_columns,
        x.shape[1],
        x.stride(0),
        num_tiles,
        GATHERED=rows is not None,
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLUMNS=config.block_columns,
        BLOCK_DEPTH=config.block_depth,
        TRANSPOSED=config.transposed,
        INPUT_PRECISION="ieee",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge_tiles_kernel[(num_rows,)](
        partials[0],
        tile_columns,
        partials[2],
        *top,
        *_mask(excluded, tile_columns),
        *columns,
        num_tiles,
        num_columns,
        BLOCK_TILES=power_of_two(num_tiles),
        num_warps=4,
    )


def _mask(mask: int | Tensor, unread: Tensor) -> tuple[int, Tensor, int]:
    """Split a mask into the value for all rows, values by row, and whether the latter are used."""
    return (0, mask, 1) if isinstance(mask, Tensor) else (mask, unread, 0)

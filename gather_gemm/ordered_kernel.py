# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernel of products whose sums have one order, whatever the number of rows."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import OrderedConfig


@triton.jit
def _sum_part(
    x,
    weight,
    first_row,
    first_column,
    start,
    end,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
):
    """Return the sums [ROWS, COLUMNS] over a part of the depth, from low to high."""
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for at in range(start, end, BLOCK_DEPTH):
        left, right = x.load([first_row, at]), weight.load([first_column, at])
        total = tl.dot(left, right.T, total, input_precision="ieee")
    return total


# Row counts change often, so there is no specialised kernel for 1 row or for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["bias", "out"])
def ordered_kernel(
    x,  # descriptor of [R, D]
    weight,  # descriptor of [N, D]
    bias,  # [N], or None when not HAS_BIAS
    out,  # [R, N]
    num_rows,
    num_columns,
    depth,
    out_stride,
    PARTS: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    # Programs that run at the same time share `GROUP` blocks of rows and a few tiles of the weight.
    num_row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    of_group = GROUP * tl.cdiv(num_columns, BLOCK_COLUMNS)
    first_block = tl.program_id(0) // of_group * GROUP
    number = tl.program_id(0) % of_group
    num_blocks = tl.minimum(num_row_blocks - first_block, GROUP)
    first_row = (first_block + number % num_blocks) * BLOCK_ROWS
    first_column = number // num_blocks * BLOCK_COLUMNS
    part = depth // PARTS
    total = _sum_part(
        x, weight, first_row, first_column, 0, part, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH
    )
    if PARTS == 2:
        total += _sum_part(
            x, weight, first_row, first_column, part, depth, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH
        )
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < num_columns
    mask = (rows < num_rows)[:, None] & is_column[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_at = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    if ADDS:
        total += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)


def launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    config: OrderedConfig,
    *,
    parts: int,
    adds: bool,
) -> None:
    """Enqueue the product on the current stream; the arguments are checked."""
    num_rows, num_columns = out.shape
    depth = config.depth
    grid = triton.cdiv(num_rows, config.rows) * triton.cdiv(num_columns, config.columns)
    ordered_kernel[(grid,)](
        TensorDescriptor.from_tensor(x, [config.rows, depth]),
        TensorDescriptor.from_tensor(weight, [config.columns, depth]),
        bias,
        out,
        num_rows,
        num_columns,
        x.shape[1],
        out.stride(0),
        PARTS=parts,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=config.rows,
        BLOCK_COLUMNS=config.columns,
        BLOCK_DEPTH=depth,
        GROUP=config.group,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )

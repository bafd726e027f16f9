# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernel of products whose sums have one order, whatever the number of rows."""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import OrderedConfig


# Row counts change often, so there is no specialised kernel for 1 row or for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["bias"])
def ordered_kernel(
    x,  # descriptor of [R, D]
    weight,  # descriptor of [N, D]
    bias,  # [N], or None when not HAS_BIAS
    out,  # descriptor of [R, N]
    num_rows,
    num_columns,
    depth,
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
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
    for at in range(0, depth, BLOCK_DEPTH):
        left, right = x.load([first_row, at]), weight.load([first_column, at])
        total = tl.dot(left, right.T, total, input_precision="ieee")
    if HAS_BIAS:
        columns = first_column + tl.arange(0, BLOCK_COLUMNS)
        some = tl.load(bias + columns, mask=columns < num_columns, other=0.0)
        total += some.to(tl.float32)[None, :]
    if ADDS:
        total += out.load([first_row, first_column]).to(tl.float32)
    out.store([first_row, first_column], total.to(out.dtype))


def launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None,
    config: OrderedConfig,
    *,
    adds: bool,
) -> None:
    """Enqueue the product on the current stream; the arguments are checked."""
    num_rows, num_columns = out.shape
    rows, columns, depth = config.rows, config.columns, config.depth
    grid = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, columns)
    ordered_kernel[(grid,)](
        TensorDescriptor.from_tensor(x, [rows, depth]),
        TensorDescriptor.from_tensor(weight, [columns, depth]),
        bias,
        TensorDescriptor.from_tensor(out, [rows, columns]),
        num_rows,
        num_columns,
        x.shape[1],
        ADDS=adds,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=rows,
        BLOCK_COLUMNS=columns,
        BLOCK_DEPTH=depth,
        GROUP=config.group,
        num_warps=config.num_warps,
        num_stages=config.stages_of(x.element_size()),
    )

# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of the gather-GEMM."""

import triton
import triton.language as tl
from torch import Tensor

from .launch import LaunchConfig


@triton.jit
def gather_gemm_kernel(
    x,  # [T, D]
    rows,  # [R] int64
    weight,  # [N, D]
    out,  # [R, N]
    num_rows,
    num_columns,
    depth,
    x_stride,
    weight_stride,
    out_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    # Row blocks are the fast axis: programs that run together share a tile of the weight.
    row_ids = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column_ids = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    depth_ids = tl.arange(0, BLOCK_DEPTH)
    row_mask = row_ids < num_rows
    column_mask = column_ids < num_columns
    # 64-bit offsets: x and out of long sequences pass 2^31 elements.
    gathered = tl.load(rows + row_ids, mask=row_mask, other=0).to(tl.int64)
    x_rows = x + gathered[:, None] * x_stride
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


def launch(x: Tensor, rows: Tensor, weight: Tensor, out: Tensor, config: LaunchConfig) -> None:
    """Enqueue ``out = x[rows] @ weight.T`` on the current stream; the arguments are checked."""
    num_rows, num_columns = out.shape
    grid = (
        triton.cdiv(num_rows, config.block_rows),
        triton.cdiv(num_columns, config.block_columns),
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
        BLOCK_ROWS=config.block_rows,
        BLOCK_COLUMNS=config.block_columns,
        BLOCK_DEPTH=config.block_depth,
        # fp32 inputs keep fp32 products: tf32 would lose half of their bits.
        INPUT_PRECISION="ieee",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )

# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels of the grouped products: each group of rows times its own matrix.

With few rows per group, reading the weights takes most of the time. So the weights are the left
operand: their rows fill the 64 rows of a tensor-core instruction, and the group's few rows fill its
columns.
"""

import functools
import os
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import GroupedConfig, choose_gated, choose_product, max_tiles, power_of_two
from .overlap import begin, overlaps, prefetch


@triton.jit
def _find_tile(
    ends,
    num_groups,
    num_column_blocks,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Find this program's group, its first row, the end of the group's rows, and its columns.

    Programs are ordered by group, then by columns, then by rows, so that programs that run at the
    same time share a tile of the weight. A program past the last tile gets no rows. Loads bypass
    L1, which may hold outdated values while an earlier kernel still runs.
    """
    program = tl.program_id(0)
    groups = tl.arange(0, GROUPS)
    is_group = groups < num_groups
    end = tl.load(ends + groups, mask=is_group, other=0, cache_modifier=".cg")
    start = tl.load(ends + groups - 1, mask=is_group & (groups > 0), other=0, cache_modifier=".cg")
    num_tiles = (end - start + ROWS - 1) // ROWS
    last = tl.cumsum(num_tiles) * num_column_blocks
    group = tl.sum((last <= program).to(tl.int32))
    mine = groups == group
    tiles = tl.maximum(tl.sum(tl.where(mine, num_tiles, 0)), 1)
    local = program - tl.sum(tl.where(mine, last - num_tiles * num_column_blocks, 0))
    first_row = tl.sum(tl.where(mine, start, 0)) + local % tiles * ROWS
    end_row = tl.sum(tl.where(mine, end, 0))
    return group, first_row, end_row, local // tiles


@triton.jit
def _prefetch_weight(
    weight_rows, row, num_rows, depth, stride, ROWS: tl.constexpr, LINES: tl.constexpr
):
    """Prefetch the first cache lines of each of these rows of the weight to L2."""
    LINE_ELEMENTS: tl.constexpr = 1024 // weight_rows.dtype.element_ty.primitive_bitwidth
    rows = row + tl.minimum(tl.arange(0, ROWS), num_rows - 1)
    columns = tl.minimum(tl.arange(0, LINES) * LINE_ELEMENTS, depth - 1)
    prefetch(weight_rows + rows.to(tl.int64)[:, None] * stride + columns[None, :])


@triton.jit
def _load_weight(
    weight,
    row,
    num_rows,
    start,
    depth,
    stride,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    if USE_TMA:
        tile = weight.load([row, start])
    else:
        rows = tl.arange(0, ROWS)
        columns = start + tl.arange(0, DEPTH)
        tile = tl.load(
            weight + (row + rows).to(tl.int64)[:, None] * stride + columns[None, :],
            mask=(rows < num_rows)[:, None] & (columns < depth)[None, :],
            other=0.0,
        )
    return tile


@triton.jit
def _load_scales(scales, row, num_rows, ROWS: tl.constexpr):
    """Load the scales of rows of an fp8 weight, as a column."""
    rows = tl.arange(0, ROWS)
    return tl.load(scales + row + rows, mask=rows < num_rows, other=0.0)[:, None]


@triton.jit
def gated_kernel(
    x,  # [T, D]
    slots,  # [S] int32
    weight,  # [E * 2 * I, D]
    weight_rows,  # pointer to the same matrix
    scales,  # [E * 2 * I] fp32 for an fp8 weight, or None
    ends,  # [E] int32
    out,  # [S, I]
    num_groups,
    num_chosen,
    width,
    depth,
    x_stride,
    weight_stride,
    out_stride,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    USE_TMA: tl.constexpr,
    AHEAD: tl.constexpr,
    IS_GELU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin(OVERLAPS)
    group, first_row, end_row, block = _find_tile(
        ends, num_groups, tl.cdiv(width, COLUMNS), GROUPS, ROWS
    )
    if first_row >= end_row:
        return
    first_column = block * COLUMNS
    gate_row = group * 2 * width + first_column
    up_row = gate_row + width
    if AHEAD > 0:
        rest = width - first_column
        _prefetch_weight(weight_rows, gate_row, rest, depth, weight_stride, COLUMNS, AHEAD)
        _prefetch_weight(weight_rows, up_row, rest, depth, weight_stride, COLUMNS, AHEAD)
    row_ids = first_row + tl.arange(0, ROWS)
    row_mask = row_ids < end_row
    tokens = tl.load(slots + row_ids, mask=row_mask, other=0) // num_chosen
    depth_ids = tl.arange(0, DEPTH)
    x_tile = x + tokens.to(tl.int64)[None, :] * x_stride + depth_ids[:, None]
    gate = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    up = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        right = tl.load(
            x_tile + start,
            mask=row_mask[None, :] & (start + depth_ids < depth)[:, None],
            other=0.0,
        )
        left = _load_weight(
            weight,
            gate_row,
            width - first_column,
            start,
            depth,
            weight_stride,
            COLUMNS,
            DEPTH,
            USE_TMA,
        )
        gate = tl.dot(left.to(right.dtype), right, gate, input_precision="ieee")
        left = _load_weight(
            weight,
            up_row,
            width - first_column,
            start,
            depth,
            weight_stride,
            COLUMNS,
            DEPTH,
            USE_TMA,
        )
        up = tl.dot(left.to(right.dtype), right, up, input_precision="ieee")
    if scales is not None:
        gate *= _load_scales(scales, gate_row, width - first_column, COLUMNS)
        up *= _load_scales(scales, up_row, width - first_column, COLUMNS)
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    inner = gate
    if IS_GELU:  # (1 + tanh(z)) / 2 is the sigmoid of 2z, with 2z = 2 sqrt(2 / pi) (g + c g^3)
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1.0 + tl.exp(-inner))).to(dtype).to(tl.float32)
    product = (active * up.to(dtype).to(tl.float32)).to(dtype)
    columns = first_column + tl.arange(0, COLUMNS)
    tl.store(
        out + row_ids.to(tl.int64)[:, None] * out_stride + columns[None, :],
        product.T,
        mask=row_mask[:, None] & (columns < width)[None, :],
    )


@triton.jit
def weighted_kernel(
    x,  # [S, D]
    weight,  # [E * N, D]
    weight_rows,  # pointer to the same matrix
    weight_scales,  # [E * N] fp32 for an fp8 weight, or None
    ends,  # [E] int32
    slots,  # [S] int32
    scales,  # [S], or None
    out,  # [S, N]
    num_groups,
    num_columns,
    depth,
    x_stride,
    weight_stride,
    out_stride,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    USE_TMA: tl.constexpr,
    AHEAD: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    OVERLAPS: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(OVERLAPS and not EARLY)
    group, first_row, end_row, block = _find_tile(
        ends, num_groups, tl.cdiv(num_columns, COLUMNS), GROUPS, ROWS
    )
    if first_row >= end_row:
        return
    first_column = block * COLUMNS
    weight_row = group * num_columns + first_column
    if AHEAD > 0:
        rest = num_columns - first_column
        _prefetch_weight(weight_rows, weight_row, rest, depth, weight_stride, COLUMNS, AHEAD)
    begin(OVERLAPS and EARLY)
    row_ids = first_row + tl.arange(0, ROWS)
    row_mask = row_ids < end_row
    out_rows = tl.load(slots + row_ids, mask=row_mask, other=0)
    depth_ids = tl.arange(0, DEPTH)
    x_tile = x + row_ids.to(tl.int64)[None, :] * x_stride + depth_ids[:, None]
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for start in range(0, depth, DEPTH):
        right = tl.load(
            x_tile + start,
            mask=row_mask[None, :] & (start + depth_ids < depth)[:, None],
            other=0.0,
        )
        left = _load_weight(
            weight,
            weight_row,
            num_columns - first_column,
            start,
            depth,
            weight_stride,
            COLUMNS,
            DEPTH,
            USE_TMA,
        )
        total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
    if weight_scales is not None:
        total *= _load_scales(weight_scales, weight_row, num_columns - first_column, COLUMNS)
    dtype = out.dtype.element_ty
    product = total.to(dtype)
    if IS_WEIGHTED:
        scale = tl.load(scales + out_rows, mask=row_mask, other=0.0).to(tl.float32)
        product = (product.to(tl.float32) * scale[None, :]).to(dtype)
    columns = first_column + tl.arange(0, COLUMNS)
    tl.store(
        out + out_rows.to(tl.int64)[:, None] * out_stride + columns[None, :],
        product.T,
        mask=row_mask[:, None] & (columns < num_columns)[None, :],
    )


def launch_gated(
    x: Tensor,
    slots: Tensor,
    num_chosen: int,
    weight: Tensor,
    ends: Tensor,
    out: Tensor,
    config: GroupedConfig | None = None,
    weight_scales: Tensor | None = None,
    *,
    is_gelu: bool = False,
) -> None:
    """Enqueue ``out = silu(gate) * up`` of the gathered rows; the arguments are checked."""
    num_groups, _, depth = weight.shape
    num_rows, width = out.shape
    config = config or choose_gated(num_rows, num_groups, x.element_size(), _shared_bytes(x.device))
    rows = weight.flatten(0, 1)  # A view, or a copy if the groups are not contiguous.
    gated_kernel[_grid(num_rows, width, num_groups, config)](
        x,
        slots,
        _tiled(rows, config),
        rows,
        weight_scales,
        ends,
        out,
        num_groups,
        num_chosen,
        width,
        depth,
        x.stride(0),
        rows.stride(0),
        out.stride(0),
        IS_GELU=is_gelu,
        **_options(rows, num_groups, config),
    )


def launch_weighted(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    slots: Tensor,
    weights: Tensor | None,
    out: Tensor,
    early: bool = False,
    config: GroupedConfig | None = None,
    weight_scales: Tensor | None = None,
) -> None:
    """Enqueue ``out = x @ weight.T`` by groups; the arguments are checked.

    Row i is weighted, if there are weights, and becomes row ``slots[i]`` of `out`. If `early`,
    `ends` and `weight` are read before the previous kernel has ended.
    """
    num_groups, num_columns, depth = weight.shape
    config = config or choose_product(len(x), num_groups, x.element_size(), _shared_bytes(x.device))
    rows = weight.flatten(0, 1)  # A view, or a copy if the groups are not contiguous.
    weighted_kernel[_grid(len(x), num_columns, num_groups, config)](
        x,
        _tiled(rows, config),
        rows,
        weight_scales,
        ends,
        slots,
        weights,
        out,
        num_groups,
        num_columns,
        depth,
        x.stride(0),
        rows.stride(0),
        out.stride(0),
        IS_WEIGHTED=weights is not None,
        EARLY=early and overlaps(x.device),
        **_options(rows, num_groups, config),
    )


def _options(weight: Tensor, num_groups: int, config: GroupedConfig) -> dict[str, int | bool]:
    """Return the compile-time options of both kernels."""
    uses_tma, can_overlap = _has_tma(weight), overlaps(weight.device)
    return {
        "GROUPS": power_of_two(num_groups),
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "DEPTH": config.depth,
        "USE_TMA": uses_tma,
        "AHEAD": config.ahead if uses_tma and can_overlap else 0,
        "OVERLAPS": can_overlap,
        "launch_pdl": can_overlap,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _grid(num_rows: int, num_columns: int, num_groups: int, config: GroupedConfig) -> tuple[int]:
    num_tiles = max_tiles(num_rows, num_groups, config.rows)
    return (num_tiles * ceil(num_columns / config.columns),)


def _tiled(matrix: Tensor, config: GroupedConfig) -> TensorDescriptor | Tensor:
    """Return a descriptor for the tensor copy engine, or the matrix if it is not supported."""
    if not _has_tma(matrix):
        return matrix
    tile = [config.columns, config.depth]
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), tile)


def _has_tma(matrix: Tensor) -> bool:
    """Whether the tensor copy engine reads this matrix: from Hopper on, rows on whole 16 bytes."""
    if matrix.is_cuda and _capability(matrix.device)[0] < 9:
        return False
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability that `VLLM_DLLM_KERNELS` sets, or the card's."""
    given = os.environ.get("VLLM_DLLM_KERNELS")
    if given:
        return tuple(map(int, given.split(".")))
    return torch.cuda.get_device_capability(device)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use in addition to its barriers."""
    if device.type != "cuda":
        return 96 * 1024
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    if _capability(device) < (9, 0):  # set by the variable, or the card's own
        most = min(most, (163 if _capability(device) == (8, 0) else 99) * 1024)
    return most - 1024

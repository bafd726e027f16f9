# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels of low-rank products: each tile of rows times the matrices of its slot.

A program reads its tile, and the rank of the tile's slot, from device memory. So launches depend on
shapes alone, and a captured graph serves any slots, ranks and contents. No kernel of a step writes
them, so a program reads them before it waits for the previous kernel. Every program waits, also one
that has no work: so a kernel ends only after all kernels before it.
"""

import functools
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import MAX_PIECES, choose_expand, choose_gated_expand, choose_shrink
from .overlap import begin, overlaps


@triton.jit
def _read_tile(tiles, tile_rows, first_row, num_rows, SHARES: tl.constexpr, ROWS: tl.constexpr):
    """Return a program's slot, its rows, which of them it computes, and whether there are any.

    SHARES programs divide a tile. Loads of tables and matrices bypass L1, because they precede the
    wait for earlier kernels.
    """
    entry = tiles + 3 * (tl.program_id(0) // SHARES)
    slot = tl.load(entry, cache_modifier=".cg").to(tl.int64)
    start = tl.load(entry + 1, cache_modifier=".cg")
    count = tl.load(entry + 2, cache_modifier=".cg")
    first = tl.program_id(0) % SHARES * ROWS
    offsets = first + tl.arange(0, ROWS)
    places = tile_rows + start + offsets
    rows = tl.load(places, mask=offsets < count, other=0, cache_modifier=".cg") - first_row
    is_row = (offsets < count) & (rows >= 0) & (rows < num_rows)
    return slot, rows.to(tl.int64), is_row, first < count


@triton.jit
def _read_rank(ranks, slot, part, ranks_stride):
    """Return the rank of a part, or of several parts, of a slot; 0 without a slot."""
    place = ranks + slot * ranks_stride + part
    return tl.load(place, mask=slot >= 0, other=0, cache_modifier=".cg")


@triton.jit
def _read_scale(scales, slot, part, scales_stride):
    """Return the factor of a part, or of several parts, of a slot; 0 without a slot."""
    place = scales + slot * scales_stride + part
    return tl.load(place, mask=slot >= 0, other=0.0, cache_modifier=".cg")


@triton.jit
def _store_by_slot(
    by_slot,  # pointers to the first number of every row, [ROWS, 1]
    scaled,  # [ROWS, RANKS] fp32, zeros where a rank is not in use
    numbers,  # their places among the numbers of a slot, [RANKS]
    is_stored,  # [ROWS, RANKS]
    slot,
    NUM_SLOTS: tl.constexpr,
    NUM_NUMBERS: tl.constexpr,
):
    """Store numbers of a row's slot, and zeros at the same places of the other slots."""
    own = scaled.to(by_slot.dtype.element_ty)
    none = tl.zeros_like(own)
    for other in range(NUM_SLOTS):
        places = by_slot + (other * NUM_NUMBERS + numbers)[None, :]
        tl.store(places, tl.where(slot == other, own, none), mask=is_stored)


_NUM_COUNTERS = 1 << 16  # tiles of the rows of a step that has few rows, times tiles of the ranks

# Numbers that differ from step to step, and tables that are read number by number. Neither selects
# a specialised kernel.
_ROWS = ["first_row", "num_rows"]
_TABLES = ["ranks", "scales", "tiles", "tile_rows"]


@triton.jit(do_not_specialize=_ROWS, do_not_specialize_on_alignment=_TABLES)
def shrink_kernel(
    x,  # [T, D]
    down,  # [slots, parts, most ranks, D]
    ranks,  # [slots, parts] int32
    tiles,  # [tiles, 3] int32
    tile_rows,  # [n] int32
    scales,  # [slots, parts] fp32, read only with BY_SLOT
    low,  # [splits, T, 1, parts * most ranks] fp32
    by_slot,  # [T, slots * parts * most ranks], written only with BY_SLOT
    counters,  # [tiles * programs of a tile] int32, zeros
    first_row,
    num_rows,
    max_rank,
    depth,
    split_depth,
    x_stride,
    slot_stride,
    part_stride,
    rank_stride,
    ranks_stride,
    scales_stride,
    split_stride,
    low_stride,
    by_slot_stride,
    NUM_SLOTS: tl.constexpr,
    MAX_NUMBERS: tl.constexpr,
    BY_SLOT: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    slot, rows, is_row, has_rows = _read_tile(tiles, tile_rows, first_row, num_rows, SHARES, ROWS)
    if not has_rows:
        begin(OVERLAPS)
        return
    rank = 0
    for part in tl.static_range(PARTS):
        rank = tl.maximum(rank, _read_rank(ranks, slot, part, ranks_stride))
    # The ranks in use of all parts are numbered without gaps. With BY_SLOT zeros are stored for all
    # other ranks, so these have numbers, too.
    if BY_SLOT:
        rank = max_rank
    first = tl.program_id(1) * RANKS
    if first >= PARTS * rank:
        begin(OVERLAPS)
        return
    numbers = first + tl.arange(0, RANKS)
    parts = numbers // rank
    own = numbers - parts * rank
    is_part = parts < PARTS
    known_parts = tl.minimum(parts, PARTS - 1)
    is_own = is_part & (own < _read_rank(ranks, slot, known_parts, ranks_stride))
    start = tl.program_id(2) * split_depth
    depth_ids = tl.arange(0, DEPTH)
    x_rows = x + rows[:, None] * x_stride
    down_rows = down + slot * slot_stride + (parts * part_stride + own * rank_stride)[None, :]
    total = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    begin(OVERLAPS)
    if BY_SLOT:
        # For rows without a slot, and for ranks that are not in use, only zeros are stored.
        split_depth = tl.where(tl.max(is_own.to(tl.int32), axis=0) > 0, split_depth, 0)
    for done in range(0, split_depth, DEPTH):
        ids = start + done + depth_ids
        left = tl.load(
            x_rows + ids[None, :], mask=is_row[:, None] & (ids < depth)[None, :], other=0.0
        )
        right = tl.load(
            down_rows + ids[:, None], mask=is_own[None, :] & (ids < depth)[:, None], other=0.0
        )
        total = tl.dot(left, right, total, input_precision="ieee")
    places = low + rows[:, None] * low_stride + (parts * max_rank + own)[None, :]
    is_low = is_row[:, None] & is_own[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(places + tl.program_id(2) * split_stride, total, mask=is_low)
        # The last program of these rows and ranks adds the parts, in their order.
        tl.debug_barrier()
        counter = counters + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            total = tl.load(places, mask=is_low, cache_modifier=".cg")
            for split in tl.static_range(1, SPLITS):
                total += tl.load(places + split * split_stride, mask=is_low, cache_modifier=".cg")
            tl.store(counter, 0)
    if is_last:
        if BY_SLOT:
            factors = _read_scale(scales, slot, known_parts, scales_stride)
            _store_by_slot(
                by_slot + rows[:, None] * by_slot_stride,
                tl.where(is_own[None, :], factors[None, :] * total, 0.0),
                numbers,
                is_row[:, None] & is_part[None, :],
                slot,
                NUM_SLOTS,
                MAX_NUMBERS,
            )
        else:
            tl.store(places, total, mask=is_low)


@triton.jit
def _load_up(
    up_columns,  # pointers to the first rank of every column, [COLUMNS]
    start,
    rank,
    is_column,
    up_stride,
    RANKS: tl.constexpr,
):
    """Load the ranks from `start` on of some columns, [RANKS, COLUMNS]."""
    ids = start + tl.arange(0, RANKS)
    return tl.load(
        up_columns[None, :] + ids[:, None] * up_stride,
        mask=(ids < rank)[:, None] & is_column[None, :],
        other=0.0,
        cache_modifier=".cg",
    )


@triton.jit
def _load_low(
    low_rows,  # pointers to the part's first number of every row, [ROWS]
    start,
    rank,
    max_rank,
    is_row,
    RANKS: tl.constexpr,
):
    """Load the numbers of the ranks from `start` on, [ROWS, RANKS]."""
    ids = start + tl.arange(0, RANKS)
    # Whole vectors are loaded, up to a multiple of 16 ranks.
    is_low = is_row[:, None] & ((ids < (rank + 15) // 16 * 16) & (ids < max_rank))[None, :]
    places = low_rows[:, None] + ids[None, :]
    low = tl.load(places, mask=is_low, other=0.0)
    return tl.where((ids < rank)[None, :], low, 0.0)


@triton.jit
def _delta(
    first_up,  # the first ranks, as `_load_up` returns them
    low_rows,
    up_columns,
    rank,
    scale,
    max_rank,
    is_row,
    is_column,
    up_stride,
    RANKS: tl.constexpr,
):
    """Return scale * (low up) of a tile in fp32; low is rounded to the dtype of up."""
    low = _load_low(low_rows, 0, rank, max_rank, is_row, RANKS)
    total = tl.dot(low.to(first_up.dtype), first_up, input_precision="ieee")
    for start in range(RANKS, rank, RANKS):
        right = _load_up(up_columns, start, rank, is_column, up_stride, RANKS)
        low = _load_low(low_rows, start, rank, max_rank, is_row, RANKS)
        total = tl.dot(low.to(right.dtype), right, total, input_precision="ieee")
    return scale * total


@triton.jit(
    do_not_specialize=[*_ROWS, "part0", "part1", "part2"],
    do_not_specialize_on_alignment=_TABLES,
)
def expand_kernel(
    low,  # [T, 1 or slots, parts * most ranks] fp32, or the dtype of up
    up,  # [slots, most ranks, N]
    ranks,  # [slots, parts] int32
    scales,  # [slots, parts] fp32
    tiles,  # [tiles, 3] int32
    tile_rows,  # [n] int32
    base,  # [T, columns]
    out,  # [T, columns]
    first_row,
    num_rows,
    max_rank,
    part0,  # three pieces of the columns, each of one part; a piece may have no columns
    source0,  # first column in up
    target0,  # first column in out
    count0,
    part1,
    source1,
    target1,
    count1,
    part2,
    source2,
    target2,
    count2,
    low_stride,
    low_slot_stride,
    slot_stride,
    up_stride,
    ranks_stride,
    scales_stride,
    base_stride,
    out_stride,
    HAS_BASE: tl.constexpr,
    ADDS: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    slot, rows, is_row, has_rows = _read_tile(tiles, tile_rows, first_row, num_rows, SHARES, ROWS)
    if not has_rows:
        begin(OVERLAPS)
        return
    block = tl.program_id(1)
    begin1 = tl.cdiv(count0, COLUMNS)
    begin2 = begin1 + tl.cdiv(count1, COLUMNS)
    is_1 = block >= begin1
    is_2 = block >= begin2
    part = tl.where(is_2, part2, tl.where(is_1, part1, part0))
    rank = _read_rank(ranks, slot, part, ranks_stride)
    if not HAS_BASE:  # noqa: SIM102 (known when the kernel is compiled, unlike the rank)
        if rank == 0:
            begin(OVERLAPS)
            return
    scale = _read_scale(scales, slot, part, scales_stride)
    source = tl.where(is_2, source2, tl.where(is_1, source1, source0))
    target = tl.where(is_2, target2, tl.where(is_1, target1, target0))
    count = tl.where(is_2, count2, tl.where(is_1, count1, count0))
    first = (block - tl.where(is_2, begin2, tl.where(is_1, begin1, 0))) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    is_column = columns < count
    up_columns = up + slot * slot_stride + source + columns
    first_up = _load_up(up_columns, 0, rank, is_column, up_stride, RANKS)
    columns += target
    is_written = is_row[:, None] & is_column[None, :]
    places = out + rows[:, None] * out_stride + columns[None, :]
    begin(OVERLAPS)
    # A tile without a slot has the rank 0, so that nothing of these addresses is read.
    total = _delta(
        first_up,
        low + rows * low_stride + slot * low_slot_stride + part * max_rank,
        up_columns,
        rank,
        scale,
        max_rank,
        is_row,
        is_column,
        up_stride,
        RANKS,
    )
    if HAS_BASE:
        bases = base + rows[:, None] * base_stride + columns[None, :]
        total += tl.load(bases, mask=is_written, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(places, mask=is_written, other=0.0).to(tl.float32)
    tl.store(places, total.to(out.dtype.element_ty), mask=is_written)


@triton.jit(do_not_specialize=_ROWS, do_not_specialize_on_alignment=_TABLES)
def gated_expand_kernel(
    low,  # [T, 1 or slots, parts * most ranks] fp32, or the dtype of up
    up,  # [slots, most ranks, N], the gate's columns first if it has a part
    ranks,  # [slots, parts] int32
    scales,  # [slots, parts] fp32
    tiles,  # [tiles, 3] int32
    tile_rows,  # [n] int32
    gate_up,  # [T, 2 I]
    out,  # [T, I]
    first_row,
    num_rows,
    max_rank,
    width,
    low_stride,
    low_slot_stride,
    slot_stride,
    up_stride,
    ranks_stride,
    scales_stride,
    gate_up_stride,
    out_stride,
    HAS_GATE: tl.constexpr,
    HAS_UP: tl.constexpr,
    SHARES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    slot, rows, is_row, has_rows = _read_tile(tiles, tile_rows, first_row, num_rows, SHARES, ROWS)
    if not has_rows:
        begin(OVERLAPS)
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < width
    # A tile without a slot has the rank 0, so that nothing of these addresses is read.
    low_rows = low + rows * low_stride + slot * low_slot_stride
    up_columns = up + slot * slot_stride + columns
    if HAS_GATE:
        gate_rank = _read_rank(ranks, slot, 0, ranks_stride)
        gate_scale = _read_scale(scales, slot, 0, scales_stride)
        first_gate = _load_up(up_columns, 0, gate_rank, is_column, up_stride, RANKS)
    if HAS_UP:
        up_rank = _read_rank(ranks, slot, HAS_GATE, ranks_stride)
        up_scale = _read_scale(scales, slot, HAS_GATE, scales_stride)
        # The columns of the half follow the gate's columns, if these have a part.
        up_half = up_columns + HAS_GATE * width
        first_half = _load_up(up_half, 0, up_rank, is_column, up_stride, RANKS)
    is_written = is_row[:, None] & is_column[None, :]
    places = gate_up + rows[:, None] * gate_up_stride + columns[None, :]
    begin(OVERLAPS)
    gate = tl.load(places, mask=is_written, other=0.0).to(tl.float32)
    half = tl.load(places + width, mask=is_written, other=0.0).to(tl.float32)
    if HAS_GATE:
        gate += _delta(
            first_gate,
            low_rows,
            up_columns,
            gate_rank,
            gate_scale,
            max_rank,
            is_row,
            is_column,
            up_stride,
            RANKS,
        )
    if HAS_UP:
        half += _delta(
            first_half,
            low_rows + HAS_GATE * max_rank,
            up_half,
            up_rank,
            up_scale,
            max_rank,
            is_row,
            is_column,
            up_stride,
            RANKS,
        )
    dtype = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    half = half.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(
        out + rows[:, None] * out_stride + columns[None, :],
        (silu * half).to(dtype),
        mask=is_written,
    )


def launch_shrink(x: Tensor, matrices, tiles, low: Tensor, by_slot: Tensor | None) -> None:
    """Enqueue the products of `shrink`; the arguments are checked."""
    down, _, ranks, scales = matrices
    num_slots, num_parts, max_rank, depth = down.shape
    num_splits, num_ranks = len(low), num_parts * max_rank
    split_depth = ceil(depth / num_splits)
    config = choose_shrink(len(x), num_ranks, split_depth, x.element_size())
    num_tiles, shares = _shares(tiles, config)
    num_programs = ceil(num_ranks / config.ranks)
    counters = _counters(x.device)
    assert num_splits == 1 or num_tiles * num_programs <= len(counters)
    shrink_kernel[num_tiles, num_programs, num_splits](
        x,
        down,
        ranks,
        tiles.table,
        tiles.rows,
        scales,
        low,
        x if by_slot is None else by_slot,
        counters,
        tiles.first_row,
        len(x),
        max_rank,
        depth,
        ceil(split_depth / config.depth) * config.depth,
        x.stride(0),
        *down.stride()[:3],
        ranks.stride(0),
        scales.stride(0),
        *low.stride()[:2],
        0 if by_slot is None else by_slot.stride(0),
        NUM_SLOTS=num_slots,
        MAX_NUMBERS=num_ranks,
        BY_SLOT=by_slot is not None,
        PARTS=num_parts,
        SPLITS=num_splits,
        **shares,
        RANKS=config.ranks,
        DEPTH=config.depth,
        **_options(x, config),
    )


def launch_expand(
    low: Tensor, matrices, tiles, out: Tensor, pieces, base: Tensor | None, adds: bool
) -> None:
    """Enqueue the sums of `expand`; the arguments are checked."""
    _, up, ranks, scales = matrices
    config = choose_expand(*out.shape, up.shape[1], out.element_size())
    num_tiles, shares = _shares(tiles, config)
    num_blocks = sum(ceil(piece.width / config.columns) for piece in pieces)
    padded = (*pieces, *[(0, 0, 0, 0)] * (MAX_PIECES - len(pieces)))
    expand_kernel[num_tiles, num_blocks](
        low,
        up,
        ranks,
        scales,
        tiles.table,
        tiles.rows,
        out if base is None else base,
        out,
        tiles.first_row,
        len(out),
        up.shape[1],
        *(number for piece in padded for number in piece),
        *_low_strides(low),
        *up.stride()[:2],
        ranks.stride(0),
        scales.stride(0),
        0 if base is None else base.stride(0),
        out.stride(0),
        HAS_BASE=base is not None,
        ADDS=adds,
        **shares,
        COLUMNS=config.columns,
        RANKS=config.ranks,
        **_options(out, config),
    )


def launch_gated_expand(
    low: Tensor, matrices, tiles, gate_up: Tensor, out: Tensor, has_gate: bool, has_up: bool
) -> None:
    """Enqueue the products of `gated_expand`; the arguments are checked."""
    (_, up, ranks, scales), width = matrices, out.shape[1]
    config = choose_gated_expand(up.shape[1], out.element_size())
    num_tiles, shares = _shares(tiles, config)
    gated_expand_kernel[num_tiles, ceil(width / config.columns)](
        low,
        up,
        ranks,
        scales,
        tiles.table,
        tiles.rows,
        gate_up,
        out,
        tiles.first_row,
        len(out),
        up.shape[1],
        width,
        *_low_strides(low),
        *up.stride()[:2],
        ranks.stride(0),
        scales.stride(0),
        gate_up.stride(0),
        out.stride(0),
        HAS_GATE=has_gate,
        HAS_UP=has_up,
        **shares,
        COLUMNS=config.columns,
        RANKS=config.ranks,
        **_options(out, config),
    )


def _low_strides(low: Tensor) -> tuple[int, int]:
    """Return the strides of the rows and the slots of `low`."""
    return low.stride(0), low.stride(1) if low.shape[1] > 1 else 0


def _shares(tiles, config) -> tuple[int, dict[str, int]]:
    """Return the number of programs of all tiles, and how they divide a tile."""
    rows = min(config.rows, tiles.size)
    shares = tiles.size // rows
    return len(tiles.table) * shares, {"SHARES": shares, "ROWS": rows}


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Return zeros that count programs; each kernel leaves zeros."""
    return torch.zeros(_NUM_COUNTERS, dtype=torch.int32, device=device)


def _options(x: Tensor, config) -> dict[str, int | bool]:
    can_overlap = overlaps(x.device)
    return {
        "OVERLAPS": can_overlap,
        "launch_pdl": can_overlap,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }

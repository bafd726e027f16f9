# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels of `split_attention`: attention to a part of the keys, and the merge of the parts.

Statistics use base 2: a part's `total` is log2 of the sum of 2^score, with the factor log2(e) /
sqrt(hd) in the scores; -inf for a part without keys.
"""

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Sequences whose tiles are counted at once: at least as many as any graph has.
SEQUENCES = tl.constexpr(512)


_MERGED_WIDTH = 1024  # numbers of the parts that a program merges at once
_FOLDED_NUMBERS = 512  # numbers of the results of a program that folds parts, a power of two


@triton.jit
def _find_tile(number, query_ends, num_sequences, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the sequence of a tile (`num_sequences` past the last), and its number there.

    Tiles are numbered sequence by sequence. Loads bypass the first cache (".cg"), which may hold
    outdated values while an earlier kernel still runs.
    """
    sequence, first_tile, before = 0, 0, 0
    for first in range(0, num_sequences, SEQUENCES):
        ids = first + tl.arange(0, SEQUENCES)
        is_sequence = ids < num_sequences
        start = tl.load(query_ends + ids, mask=is_sequence, other=0, cache_modifier=".cg")
        end = tl.load(query_ends + ids + 1, mask=is_sequence, other=0, cache_modifier=".cg")
        num_tiles = ((end - start) * GROUP + ROWS - 1) // ROWS
        last = before + tl.cumsum(num_tiles, axis=0)
        is_before = is_sequence & (last <= number)
        sequence += tl.sum(is_before.to(tl.int32))
        first_tile = tl.maximum(first_tile, tl.max(tl.where(is_before, last, 0)))
        before = tl.max(last)
    return sequence, number - first_tile


@triton.jit
def _attend_part(
    q_tile,
    k_at,
    v_at,
    k_row,
    v_row,
    page_rows,
    first_key,
    page,
    start,
    whole_start,
    whole_end,
    end,
    row_start,
    row_end,
    scale,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
):
    """Return attention [ROWS, HEAD_DIM] to keys [start, end), and log2 of the sum of 2^score.

    All rows read the tiles from `whole_start` to `whole_end` whole. Tiles before these, where some
    rows' windows begin, and tiles after these are masked.
    """
    BEFORE: tl.constexpr = 0
    WHOLE: tl.constexpr = 1
    keys = tl.arange(0, KEYS)
    highest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    mixed = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
    for PHASE in tl.static_range(BEFORE if WINDOW else WHOLE, 3):
        phase_start = start if PHASE == BEFORE else (whole_start if PHASE == WHOLE else whole_end)
        phase_end = whole_start if PHASE == BEFORE else (whole_end if PHASE == WHOLE else end)
        for at in range(phase_start, phase_end, KEYS):
            if PAGE:
                tile_row = (page + at % PAGE).to(tl.int64)
                later = at + KEYS
                page = tl.load(page_rows + (first_key + later) // PAGE, mask=later < end, other=0)
            else:
                tile_row = (first_key + at).to(tl.int64)
            k_tile_at, v_tile_at = k_at + tile_row * k_row, v_at + tile_row * v_row
            if PHASE != WHOLE:
                is_key = at + keys < end
                k_tile = tl.load(k_tile_at, mask=is_key[None, :], other=0.0)
                v_tile = tl.load(v_tile_at, mask=is_key[:, None], other=0.0)
            else:
                k_tile, v_tile = tl.load(k_tile_at), tl.load(v_tile_at)
            scores = tl.dot(q_tile, k_tile, input_precision="ieee")
            if PHASE != WHOLE:
                is_read = (at + keys)[None, :] < row_end[:, None] if HAS_BLOCKS else is_key[None, :]
                if WINDOW:
                    is_read &= (at + keys)[None, :] >= row_start[:, None]
                scores = tl.where(is_read, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
            base = higher
            # A row that has read no key has no highest score yet.
            if PHASE != WHOLE and HAS_BLOCKS:
                base = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores * scale - base[:, None])
            fade = tl.exp2(highest - base)
            total = total * fade + tl.sum(weights, axis=1)
            mixed = tl.dot(
                weights.to(v_tile.dtype), v_tile, mixed * fade[:, None], input_precision="ieee"
            )
            highest = higher
    # Without keys all sums are zero, and so is the result.
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    return mixed, highest + tl.log2(total)


@triton.jit
def _fold(best, sums, mixed, part, total):
    """Add a part [SLOTS, HEAD_DIM] with its `total` [SLOTS] to the parts before it.

    Parts without keys have a total of -inf and change nothing. The operations are explicit, so that
    every kernel that folds parts rounds alike.
    """
    higher = tl.maximum(best, total)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade, weight = tl.exp2(best - base), tl.exp2(total - base)
    has_keys = total != float("-inf")
    sums = tl.where(has_keys, tl.fma(sums, fade, weight), sums)
    added = tl.fma(part, weight[:, None], mixed * fade[:, None])
    return higher, sums, tl.where(has_keys[:, None], added, mixed)


# Values that change from step to step must not make Triton compile again.
@triton.jit(
    do_not_specialize=["num_sequences", "num_rows", "num_splits"],
    do_not_specialize_on_alignment=[
        "query_ends",
        "key_starts",
        "key_counts",
        "block_lengths",
        "firsts",
        "page_rows",
    ],
)
def part_kernel(
    q,  # [R, H, hd]
    k,  # [N, KV, hd]
    v,  # [N, KV, hd]
    out,  # [R, H, hd], written if the keys are not split
    parts,  # [splits, R, H, hd] fp32, written if they are split: attention to each part of the keys
    totals,  # [splits, R, H] fp32, written if the keys are split
    query_ends,  # [S + 1] int32
    key_starts,  # [S] int32
    key_counts,  # [S] int32
    # [S] int32: keys of a block, 0 for sequences without blocks; None without blocks and windows
    block_lengths,
    firsts,  # [S] int32: position of the first query; None without blocks and windows
    page_rows,  # [E] int32: first row of the keys of every page; None without pages
    scale,
    num_sequences,
    num_rows,
    num_splits,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    PART_KEYS: tl.constexpr,  # keys of a part, a multiple of KEYS; 0: as many as keep the GPU busy
    PAGE: tl.constexpr,  # keys of a page, a multiple of KEYS; 0 without a page table
    # Keys that a row on a grid reads, its own included. Rows without a grid read the block that
    # begins with their first row, and one key less before it. 0: no windows.
    WINDOW: tl.constexpr,
    HAS_BLOCKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    # The last programs compute tiles that the captured graph has and this step lacks, so the other
    # programs start on all multiprocessors if possible.
    KV_HEADS: tl.constexpr = HEADS // GROUP
    program = tl.program_id(0)
    number = program // (KV_HEADS * num_splits)
    split, kv_head = program // KV_HEADS % num_splits, program % KV_HEADS
    sequence, tile = _find_tile(number, query_ends, num_sequences, GROUP, ROWS)
    known_sequence = tl.minimum(sequence, num_sequences - 1)
    first_row = tl.load(query_ends + known_sequence, cache_modifier=".cg")
    num_queries = tl.load(query_ends + known_sequence + 1, cache_modifier=".cg") - first_row
    first_key = tl.load(key_starts + known_sequence, cache_modifier=".cg")
    num_keys = tl.load(key_counts + known_sequence, cache_modifier=".cg")
    # The query heads of a key/value head are adjacent rows, so keys are read once for all of them.
    packed = tile * ROWS + tl.arange(0, ROWS)
    query = packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    is_row = query < num_queries
    row = (first_row + query).to(tl.int64)
    before = 0  # no row of the tile reads the keys before this one
    row_start, row_end = 0, 0  # unread without windows, and without blocks
    if HAS_BLOCKS:
        block_length = tl.load(block_lengths + known_sequence, cache_modifier=".cg")
        first = tl.load(firsts + known_sequence, cache_modifier=".cg")
    if WINDOW:
        has_grid = tl.where(block_length > 0, 1, 0)
        row_start = first - WINDOW + 1 + has_grid * query
        # These are scalars, because Triton does not pipeline loops that start at a reduced number.
        least_start = first - WINDOW + 1 + has_grid * (tile * ROWS // GROUP)
        largest_start = first - WINDOW + 1 + has_grid * ((tile * ROWS + ROWS - 1) // GROUP)
        before = tl.maximum(least_start, 0) // KEYS * KEYS
    if PART_KEYS:
        share = PART_KEYS if IS_SPLIT else tl.maximum(num_keys, 1)
    else:
        steps = tl.cdiv(tl.cdiv(num_keys - before, num_splits), KEYS)
        share = tl.maximum(steps * KEYS, MIN_KEYS)
    start = before + split * share
    end = tl.minimum(start + share, num_keys)
    read_by_all = end  # all rows read the keys before this one
    # Each row reads up to the end of its block, and the tile up to the end of its last row.
    if HAS_BLOCKS:
        length = tl.where(block_length > 0, block_length, num_keys)
        block = (first + query) // tl.maximum(length, 1)
        row_end = tl.minimum((block + 1) * length, num_keys)
        read_by_all = tl.minimum(end, tl.min(tl.where(is_row, row_end, num_keys)))
        end = tl.minimum(end, tl.max(tl.where(is_row, row_end, 0)))
    page = 0
    # The page is loaded a tile ahead: loads that waited for it would be pipelined less deeply.
    if PAGE:
        page_at = page_rows + (first_key + start) // PAGE
        page = tl.load(page_at, mask=start < end, other=0, cache_modifier=".cg")
    if OVERLAPS:
        # Up to here this kernel overlaps the end of the previous one, because the layout of a step
        # is known from its start.
        gdc_wait()
        gdc_launch_dependents()  # from here on the next kernel may start
    if sequence == num_sequences:
        return
    slot = (split * num_rows + row) * HEADS + head
    if IS_SPLIT:  # noqa: SIM102 (known at compile time)
        if start >= end:
            tl.store(totals + slot, float("-inf"), mask=is_row)
            return

    columns = tl.arange(0, HEAD_DIM)
    keys = tl.arange(0, KEYS)
    q_tile = tl.load(
        q + row[:, None] * q_row + head[:, None] * q_head + columns[None, :],
        mask=is_row[:, None],
        other=0.0,
    )
    k_at = k + keys.to(tl.int64)[None, :] * k_row + kv_head * k_head + columns[:, None]
    v_at = v + keys.to(tl.int64)[:, None] * v_row + kv_head * v_head + columns[None, :]
    if PART_KEYS and not IS_SPLIT:
        # One program computes all parts, as fold_kernel would fold them.
        best = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        sums = tl.zeros((ROWS,), dtype=tl.float32)
        mixed = tl.zeros((ROWS, HEAD_DIM), dtype=tl.float32)
        for part_start in range(start, end, PART_KEYS):
            part_end = tl.minimum(part_start + PART_KEYS, end)
            num_whole = tl.maximum(tl.minimum(read_by_all, part_end) - part_start, 0)
            if PAGE:
                page = tl.load(page_rows + (first_key + part_start) // PAGE)
            part, total = _attend_part(
                q_tile,
                k_at,
                v_at,
                k_row,
                v_row,
                page_rows,
                first_key,
                page,
                part_start,
                part_start,
                part_start + num_whole // KEYS * KEYS,
                part_end,
                row_start,
                row_end,
                scale,
                ROWS,
                HEAD_DIM,
                KEYS,
                PAGE,
                WINDOW,
                HAS_BLOCKS,
            )
            best, sums, mixed = _fold(best, sums, mixed, part, total)
        mixed = mixed / tl.where(sums == 0.0, 1.0, sums)[:, None]
        total = best
    else:
        # All rows read the tiles from `whole_start` to `whole_end` whole, which are most tiles.
        whole_start, whole_end = start, start + tl.maximum(read_by_all - start, 0) // KEYS * KEYS
        if WINDOW:
            whole_start = tl.cdiv(tl.maximum(largest_start, start), KEYS) * KEYS
            whole_start = tl.minimum(whole_start, whole_end)
        mixed, total = _attend_part(
            q_tile,
            k_at,
            v_at,
            k_row,
            v_row,
            page_rows,
            first_key,
            page,
            start,
            whole_start,
            whole_end,
            end,
            row_start,
            row_end,
            scale,
            ROWS,
            HEAD_DIM,
            KEYS,
            PAGE,
            WINDOW,
            HAS_BLOCKS,
        )
    if IS_SPLIT:
        tl.store(totals + slot, total, mask=is_row)
        at_part = slot[:, None] * HEAD_DIM + columns[None, :]
        tl.store(parts + at_part, mixed, mask=is_row[:, None])
    else:
        at_out = (row * HEADS + head)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out + at_out, mixed.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=["num_slots", "num_splits"])
def merge_kernel(
    parts,  # [splits, R, H, hd] fp32; parts without keys are not read
    totals,  # [splits, R, H] fp32
    out,  # [R, H, hd], written
    num_slots,  # R * H
    num_splits,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    PARTS: tl.constexpr,  # parts merged at once
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, HEAD_DIM)
    splits = tl.arange(0, MAX_SPLITS)
    all_totals = tl.load(
        totals + splits * num_slots + slot, mask=splits < num_splits, other=float("-inf")
    )
    highest = tl.max(all_totals, axis=0)
    # Without keys all totals are -inf, and the weights are zero.
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    sums = tl.sum(tl.exp2(all_totals - highest), axis=0)
    mixed = tl.zeros((HEAD_DIM,), dtype=tl.float32)
    for first in range(0, num_splits, PARTS):
        some = first + tl.arange(0, PARTS)
        slots = some * num_slots + slot
        total = tl.load(totals + slots, mask=some < num_splits, other=float("-inf"))
        part = tl.load(
            parts + slots[:, None] * HEAD_DIM + columns[None, :],
            mask=(total != float("-inf"))[:, None],
            other=0.0,
        )
        mixed += tl.sum(part * tl.exp2(total - highest)[:, None], axis=0)
    mixed = mixed / tl.where(sums == 0.0, 1.0, sums)
    tl.store(out + slot * HEAD_DIM + columns, mixed.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_slots", "num_splits"])
def fold_kernel(
    parts,  # [splits, R, H, hd] fp32; parts without keys are not read
    totals,  # [splits, R, H] fp32
    out,  # [R, H, hd], written
    num_slots,  # R * H
    num_splits,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,  # slots of a program
    OVERLAPS: tl.constexpr,
):
    """Merge the parts of each slot one after another, whatever their number."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    slots = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    is_slot = slots < num_slots
    columns = tl.arange(0, HEAD_DIM)
    best = tl.full((SLOTS,), float("-inf"), dtype=tl.float32)
    sums = tl.zeros((SLOTS,), dtype=tl.float32)
    mixed = tl.zeros((SLOTS, HEAD_DIM), dtype=tl.float32)
    for split in range(num_splits):
        at = tl.cast(split, tl.int64) * num_slots + slots
        total = tl.load(totals + at, mask=is_slot, other=float("-inf"))
        part = tl.load(
            parts + at[:, None] * HEAD_DIM + columns[None, :],
            mask=(total != float("-inf"))[:, None],
            other=0.0,
        )
        best, sums, mixed = _fold(best, sums, mixed, part, total)
    mixed = mixed / tl.where(sums == 0.0, 1.0, sums)[:, None]
    tl.store(
        out + slots[:, None] * HEAD_DIM + columns[None, :],
        mixed.to(out.dtype.element_ty),
        mask=is_slot[:, None],
    )


def launch(
    heads: tuple[Tensor, Tensor, Tensor, Tensor],
    sequences: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    page_rows: Tensor | None,
    *,
    page_size: int,
    window: int,
    scale: float,
    num_tiles: int,
    num_splits: int,
    min_keys: int,
    part_keys: int,
    max_splits: int,
    config,
    overlaps: bool,
) -> None:
    """Launch attention over sequences, and the merge if keys are split.

    `heads` contains q, k, v and out. `sequences` contains query ends, key starts, key counts, and
    block lengths and firsts or None. `page_rows` is the page table, if there is one.
    """
    q, k, v, out = heads
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    is_split = num_splits > 1
    parts = totals = None
    if is_split:
        parts = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
        totals = torch.empty(parts.shape[:-1], dtype=torch.float32, device=q.device)
    part_kernel[(num_tiles * num_splits * num_kv_heads,)](
        *heads,
        parts,
        totals,
        *sequences,
        page_rows,
        scale,
        len(sequences[2]),
        num_rows,
        num_splits,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=config.rows,
        KEYS=config.keys,
        MIN_KEYS=min_keys,
        PART_KEYS=part_keys,
        PAGE=page_size,
        WINDOW=window,
        HAS_BLOCKS=sequences[3] is not None,
        IS_SPLIT=is_split,
        OVERLAPS=overlaps,
        launch_pdl=overlaps,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if parts is not None and totals is not None:
        _launch_merge(parts, totals, out, 0 if part_keys else max_splits, overlaps)


def _launch_merge(
    parts: Tensor, totals: Tensor, out: Tensor, max_splits: int, overlaps: bool
) -> None:
    """Merge at most `max_splits` parts, or with 0 any number of them, one after another."""
    num_splits, num_rows, num_heads, head_dim = parts.shape
    if not max_splits:
        _launch_fold(parts, totals, out, overlaps)
        return
    merge_kernel[(num_rows * num_heads,)](
        parts,
        totals,
        out,
        num_rows * num_heads,
        num_splits,
        HEAD_DIM=head_dim,
        MAX_SPLITS=max_splits,
        PARTS=min(_MERGED_WIDTH // head_dim, 8),
        OVERLAPS=overlaps,
        launch_pdl=overlaps,
        num_warps=1 if head_dim <= 128 else 2,
    )


def _launch_fold(parts: Tensor, totals: Tensor, out: Tensor, overlaps: bool) -> None:
    num_splits, num_rows, num_heads, head_dim = parts.shape
    num_slots, slots = num_rows * num_heads, max(_FOLDED_NUMBERS // head_dim, 1)
    fold_kernel[(ceil(num_slots / slots),)](
        parts,
        totals,
        out,
        num_slots,
        num_splits,
        HEAD_DIM=head_dim,
        SLOTS=slots,
        OVERLAPS=overlaps,
        launch_pdl=overlaps,
        num_warps=4,
    )

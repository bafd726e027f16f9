# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels around the experts: scores and choice, the order of the rows, the final sum.

The product with the router is small, so latency decides its time. It is divided along the depth,
with one program per tile. The programs read their part of the router while the previous kernel
ends. The kernel that chooses the experts adds the parts.
"""

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import power_of_two
from .overlap import begin_open, overlaps
from .scoring import Scoring


# Row counts change often, so no kernel is specialised for 1 row or for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def score_kernel(
    x,  # [R, D]
    gate,  # [E, D]
    parts,  # [P, R, E] fp32, written: the products of each tile of the depth
    num_rows,
    num_experts,
    depth,
    x_stride,
    gate_stride,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row_ids = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    experts = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    part = tl.program_id(2)
    depth_ids = part * DEPTH + tl.arange(0, DEPTH)
    is_row, is_expert, is_deep = row_ids < num_rows, experts < num_experts, depth_ids < depth
    left = tl.load(
        gate + experts.to(tl.int64)[:, None] * gate_stride + depth_ids[None, :],
        mask=is_expert[:, None] & is_deep[None, :],
        other=0.0,
    )
    begin_open(OVERLAPS)  # Only a weight was read so far, and no kernel writes weights.
    right = tl.load(
        x + row_ids.to(tl.int64)[None, :] * x_stride + depth_ids[:, None],
        mask=is_row[None, :] & is_deep[:, None],
        other=0.0,
    )
    products = tl.dot(left, right, input_precision="ieee")
    into = (part * num_rows + row_ids).to(tl.int64)[:, None] * num_experts + experts[None, :]
    tl.store(parts + into, products.T, mask=is_row[:, None] & is_expert[None, :])


@triton.jit
def _sum_of_parts(
    logits,
    first_row,
    num_rows,
    num_experts,
    logits_stride,
    NUM_PARTS: tl.constexpr,
    LINES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Load logits [LINES, EXPERTS] fp32, the sum of their parts; -inf outside the rows and experts.

    Rows are loaded in pieces that fill a warp with 16 bytes per thread, the first pieces of all
    rows first. So Triton gives all pieces of a row to one warp, and the search for a row's best
    expert never waits for other warps.
    """
    WIDTH: tl.constexpr = 128 if EXPERTS > 128 else EXPERTS
    PIECES: tl.constexpr = EXPERTS // WIDTH
    pieces = tl.arange(0, PIECES * LINES)
    row_ids = first_row + pieces % LINES
    columns = (pieces // LINES * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    at = row_ids.to(tl.int64)[:, None] * logits_stride + columns
    inside = (row_ids < num_rows)[:, None] & (columns < num_experts)
    total = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        more = logits + part * num_rows * logits_stride + at  # Parts are contiguous.
        total += tl.load(more, mask=inside, other=float("-inf"))
    total = tl.permute(tl.reshape(total, (PIECES, LINES, WIDTH)), (1, 0, 2))
    return tl.reshape(total, (LINES, EXPERTS))


@triton.jit
def _scores(logits, is_row, is_expert, IS_SIGMOID: tl.constexpr):
    """Compute sigmoids, or each row's probabilities, [LINES, EXPERTS]."""
    given = tl.where(is_row[:, None], logits, 0.0)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-given))
    else:
        powers = tl.where(is_expert[None, :], tl.exp(given - tl.max(given, axis=1)[:, None]), 0.0)
        scores = powers / tl.sum(powers, axis=1)[:, None]
    return scores


@triton.jit
def _at_least(ranks):
    """Replace NaN and -inf by the least number, so that such rows choose the lowest experts."""
    return tl.where(ranks > -3.0e38, ranks, -3.0e38)


@triton.jit
def _group_sums(ranks, num_experts, NUM_GROUPS: tl.constexpr, EXPERTS: tl.constexpr):
    """Compute, for every expert, the sum of the two best ranks of its group [ROWS, EXPERTS]."""
    experts = tl.arange(0, EXPERTS)[None, :]
    size = num_experts // NUM_GROUPS
    groups = experts // size
    sums = tl.full(ranks.shape, float("-inf"), dtype=tl.float32)
    for group in range(NUM_GROUPS):
        members = tl.where(groups == group, ranks, float("-inf"))
        best = tl.max(members, axis=1)
        winner = tl.argmax(members, axis=1)
        second = tl.max(tl.where(experts == winner[:, None], float("-inf"), members), axis=1)
        sums = tl.where(groups == group, _at_least(best + second)[:, None], sums)
    return sums


@triton.jit
def _even_group_sums(ranks, NUM_GROUPS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Compute `_group_sums` for all groups at once, if their sizes are powers of two."""
    SIZE: tl.constexpr = EXPERTS // NUM_GROUPS
    members = tl.reshape(ranks, (ROWS, NUM_GROUPS, SIZE))
    best = tl.max(members, axis=2)
    is_best = tl.arange(0, SIZE)[None, None, :] == tl.argmax(members, axis=2)[:, :, None]
    second = tl.max(tl.where(is_best, float("-inf"), members), axis=2)
    sums = tl.broadcast_to(_at_least(best + second)[:, :, None], (ROWS, NUM_GROUPS, SIZE))
    return tl.reshape(sums, (ROWS, EXPERTS))


@triton.jit
def _in_kept_groups(
    ranks,
    is_expert,
    num_experts,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Mark the experts of the groups whose two best ranks have the largest sums.

    Ties go to the lowest group.
    """
    if IS_EVEN:
        sums = _even_group_sums(ranks, NUM_GROUPS, ROWS, EXPERTS)
    else:
        sums = _group_sums(ranks, num_experts, NUM_GROUPS, EXPERTS)
    groups = tl.arange(0, EXPERTS)[None, :] // (num_experts // NUM_GROUPS)
    is_open = tl.broadcast_to(is_expert[None, :], ranks.shape)
    for _ in range(NUM_KEPT):
        winner = tl.argmax(tl.where(is_open, sums, float("-inf")), axis=1)
        is_open = is_open & (groups != winner[:, None] // (num_experts // NUM_GROUPS))
    return is_expert[None, :] & ~is_open


@triton.jit
def _in_capacity(ranks, CAPACITY: tl.constexpr):
    """Mark the CAPACITY experts [EXPERTS] whose best ranks in any row of a window are the largest.

    Ties go to the lowest expert. The least of these ranks is found bit by bit, by counting the
    experts that reach it. All warps compute the same, because each holds all numbers and so waits
    for no other warp.
    """
    best = tl.max(ranks, axis=0)
    bits = best.to(tl.uint32, bitcast=True)
    # Integers in the same order, with one key for both zeros.
    keys = tl.where(best < 0.0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    least, bit = tl.full((), 0, dtype=tl.uint32), tl.full((), 0x80000000, dtype=tl.uint32)
    for _ in range(32):
        reached = tl.sum((keys >= (least | bit)).to(tl.int32), axis=0)
        least = tl.where(reached >= CAPACITY, least | bit, least)
        bit = bit >> 1
    is_above, is_tied = keys > least, keys == least
    num_left = CAPACITY - tl.sum(is_above.to(tl.int32), axis=0)
    return is_above | (is_tied & (tl.cumsum(is_tied.to(tl.int32)) <= num_left))


@triton.jit
def _open_first(ranks, is_open):
    """Rank closed experts below all others.

    A row with too few open experts takes the lowest closed ones.
    """
    return tl.where(is_open, ranks, -3.2e38)  # less than `_at_least` returns, and more than -inf


@triton.jit
def _choose(ranks, can_be_chosen, num_chosen, EXPERTS: tl.constexpr):
    """Mark the num_chosen best of each row of ranks [LINES, EXPERTS]; ties go to the lowest one."""
    experts = tl.arange(0, EXPERTS)[None, :]
    is_open = can_be_chosen
    for _ in range(num_chosen):
        winner = tl.argmax(tl.where(is_open, ranks, float("-inf")), axis=1)
        is_open = is_open & (experts != winner[:, None])
    return can_be_chosen & ~is_open


# Not specialised for 1 choice either: Triton 3.6 fails on the loop of one iteration that would be
# left.
@triton.jit(do_not_specialize=["num_rows", "num_chosen", "scale", "logit_scale"])
def choose_kernel(
    logits,  # [P, R, E]; the kernel sums the parts and rounds to the dtype of the weights
    bias,  # [E] fp32, or None
    expert_scales,  # [E] fp32, or None
    # [R, K + S], written: in ascending order of experts, then 1 for the shared expert if S = 1
    weights,
    members,  # [R, K] int16, written if the rows take several blocks: in ascending order of experts
    slots,  # [R * (K + S)] int32, written if one block holds all rows
    ends,  # [S + E] int32, written if one block holds all rows
    num_rows,
    num_experts,
    num_chosen,
    logits_stride,
    scale,
    logit_scale,
    NUM_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,  # the power of two at or above ROWS
    EXPERTS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CAPACITY: tl.constexpr,  # capacity of a window, which is the rows of a program; 0: no windows
    IS_WHOLE: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_open(OVERLAPS)
    block = tl.program_id(0)
    lines = tl.arange(0, LINES)
    row_ids = block * ROWS + lines
    experts = tl.arange(0, EXPERTS)
    is_row, is_expert = (lines < ROWS) & (row_ids < num_rows), experts < num_experts
    inside = is_row[:, None] & is_expert[None, :]
    given = _sum_of_parts(
        logits, block * ROWS, num_rows, num_experts, logits_stride, NUM_PARTS, LINES, EXPERTS
    )
    given = given.to(weights.dtype.element_ty).to(tl.float32) * logit_scale
    scores = _scores(given, is_row, is_expert, IS_SIGMOID)
    ranks = scores
    if bias is not None:
        ranks += tl.load(bias + experts, mask=is_expert, other=0.0)[None, :]
    ranks = _at_least(ranks)
    if NUM_GROUPS > 1:
        is_open = _in_kept_groups(
            ranks, is_expert, num_experts, NUM_GROUPS, NUM_KEPT, IS_EVEN, LINES, EXPERTS
        )
        ranks = _open_first(ranks, is_open)
    if CAPACITY > 0:
        is_open = _in_capacity(tl.where(inside, ranks, float("-inf")), CAPACITY)
        ranks = _open_first(ranks, is_open[None, :])
    is_chosen = _choose(ranks, inside, num_chosen, EXPERTS)
    ones = is_chosen.to(tl.int32)
    slot = row_ids[:, None] * (num_chosen + NUM_SHARED) + tl.cumsum(ones, axis=1) - 1
    if IS_NORMALISED:
        scores /= tl.sum(tl.where(is_chosen, scores, 0.0), axis=1)[:, None] + 1e-20
    scores *= scale
    if expert_scales is not None:
        scores *= tl.load(expert_scales + experts, mask=is_expert, other=0.0)[None, :]
    tl.store(weights + slot, scores.to(weights.dtype.element_ty), mask=is_chosen)
    if NUM_SHARED > 0:
        shared_slot = row_ids * (num_chosen + 1) + num_chosen
        one = tl.full((LINES,), 1.0, dtype=tl.float32)
        tl.store(weights + shared_slot, one.to(weights.dtype.element_ty), mask=is_row)
    if IS_WHOLE:
        totals = tl.sum(ones, axis=0)
        last = num_rows * NUM_SHARED + tl.cumsum(totals)
        tl.store(ends + NUM_SHARED + experts, last, mask=is_expert)
        position = (last - totals)[None, :] + tl.cumsum(ones, axis=0) - 1
        tl.store(slots + position, slot, mask=is_chosen)
        if NUM_SHARED > 0:
            tl.store(ends, num_rows)
            tl.store(slots + row_ids, shared_slot, mask=is_row)
    else:
        member = tl.broadcast_to(experts[None, :], slot.shape)
        place = slot - row_ids[:, None] * NUM_SHARED
        tl.store(members + place, member.to(tl.int16), mask=is_chosen)


@triton.jit(do_not_specialize=["num_rows"])
def sort_kernel(
    members,  # [R * K] int16: the expert of every chosen place
    slots,  # [R * (K + S)] int32, written
    ends,  # [S + E] int32, written
    num_rows,
    NUM_CHOSEN: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """List an expert's slots in one program, after counting the slots of the experts before it.

    The shared expert, if there is one, is the first, and takes the last place of every row.
    """
    begin_open(OVERLAPS)
    expert = tl.program_id(0) - NUM_SHARED
    num_members = num_rows * NUM_CHOSEN
    if NUM_SHARED > 0:
        rows = tl.arange(0, LINES)
        for first in range(0, tl.where(expert < 0, num_rows, 0), LINES):
            row = first + rows
            tl.store(slots + row, row * (NUM_CHOSEN + 1) + NUM_CHOSEN, mask=row < num_rows)
    places = tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    earlier = tl.zeros((LINES, WIDTH), dtype=tl.int32)
    for first in range(0, num_members, LINES * WIDTH):
        inside = first + places < num_members
        member = tl.load(members + first + places, mask=inside, other=32767)
        earlier += (member < expert).to(tl.int32)
    end = num_rows * NUM_SHARED + tl.sum(tl.sum(earlier, axis=1), axis=0)
    for first in range(0, num_members, LINES * WIDTH):
        inside = first + places < num_members
        member = tl.load(members + first + places, mask=inside, other=32767)
        ones = (member == expert).to(tl.int32)
        totals = tl.sum(ones, axis=1)
        position = end + (tl.cumsum(totals) - totals)[:, None] + tl.cumsum(ones, axis=1) - 1
        place = first + places
        slot = place + place // NUM_CHOSEN * NUM_SHARED
        tl.store(slots + position, slot, mask=ones > 0)
        end += tl.sum(totals, axis=0)
    tl.store(ends + NUM_SHARED + expert, end)


@triton.jit
def sum_kernel(
    terms,  # [R, K, D]
    weights,  # [R, K] fp32, if the sum is weighted
    addend,  # [R, D]
    out,  # [R, D]
    num_columns,
    terms_stride,
    weights_stride,
    addend_stride,
    out_stride,
    NUM_TERMS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_WEIGHTED: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_open(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < num_columns
    dtype = out.dtype.element_ty
    term = terms + row * terms_stride + columns
    total = tl.load(term, mask=mask, other=0.0).to(tl.float32)
    if IS_WEIGHTED:
        total *= tl.load(weights + row * weights_stride)
    for index in tl.static_range(1, NUM_TERMS):
        more = tl.load(term + index * num_columns, mask=mask, other=0.0).to(tl.float32)
        if IS_WEIGHTED:
            total += more * tl.load(weights + row * weights_stride + index)
        else:  # Every sum is rounded to the model dtype.
            total = (total + more).to(dtype).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if HAS_ADDEND:
        more = tl.load(addend + row * addend_stride + columns, mask=mask, other=0.0)
        total = (total + more.to(tl.float32)).to(dtype).to(tl.float32)
    into = out + row * out_stride + columns
    if ADDS:
        total += tl.load(into, mask=mask, other=0.0).to(tl.float32)
    tl.store(into, total.to(dtype), mask=mask)


# Tile [experts, rows, depth] of a program that computes scores. 64 rows of a matrix are one
# tensor-core instruction.
_SCORE_EXPERTS, _SCORE_ROWS, _SCORE_DEPTH = 64, 16, 256
# _CHOICES: the maximum number of elements [rows, experts] of all rows, then the elements of a
# program of the choice, and its warps. If everything fits into one program, no kernel is needed for
# the order. Otherwise choosing is fastest if a row stays within a warp. A window is one program,
# with a maximum number of elements in total and, because of the registers, per warp.
_CHOICES = ((512, (512, 4)), (None, (256, 1)))
_MAX_WINDOW_ELEMENTS, _WINDOW_OF_WARP = 16_384, 1024
_SORT_TILE = (1024, 8)  # Slots that a program sorts at once: 16 bytes of each line.


def launch_score(x: Tensor, gate: Tensor) -> Tensor:
    """Enqueue the parts [P, R, E] fp32 whose sum is ``x @ gate.T``; the arguments are checked."""
    (num_rows, depth), num_experts = x.shape, len(gate)
    num_parts = ceil(depth / _SCORE_DEPTH)
    parts = x.new_empty((num_parts, num_rows, num_experts), dtype=torch.float32)
    grid = (
        ceil(num_rows / _SCORE_ROWS),
        ceil(num_experts / _SCORE_EXPERTS),
        num_parts,
    )
    score_kernel[grid](
        x,
        gate,
        parts,
        num_rows,
        num_experts,
        depth,
        x.stride(0),
        gate.stride(0),
        ROWS=_SCORE_ROWS,
        EXPERTS=_SCORE_EXPERTS,
        DEPTH=_SCORE_DEPTH,
        OVERLAPS=overlaps(x.device),
        launch_pdl=overlaps(x.device),
        num_warps=4,
    )
    return parts


def launch_route(
    logits: Tensor,
    num_chosen: int,
    bias: Tensor | None,
    expert_scales: Tensor | None,
    scoring: Scoring,
    weights: Tensor,
    slots: Tensor,
    ends: Tensor,
    block: tuple[int, int] | None = None,
) -> None:
    """Enqueue the choice and the order of the rows; the arguments are checked.

    If `weights` has one column more than `num_chosen`, rows have one more expert (`has_shared`).
    `logits` is [R, E], or the result of `launch_score`. `block` holds the elements and the warps of
    a program of the choice; with windows only the warps are used.
    """
    parts = logits if logits.dim() == 3 else logits[None]
    num_parts, num_rows, num_experts = parts.shape
    experts = power_of_two(num_experts)
    elements, num_warps = block or _choose_block(num_rows, num_experts, scoring.window)
    rows = scoring.window or max(1, elements // experts)
    num_blocks = ceil(num_rows / rows)
    is_whole = num_blocks == 1
    num_shared = weights.shape[1] - num_chosen
    members = None if is_whole else slots.new_empty(num_rows * num_chosen, dtype=torch.int16)
    choose_kernel[(num_blocks,)](
        parts,
        bias,
        expert_scales,
        weights,
        members,
        slots,
        ends,
        num_rows,
        num_experts,
        num_chosen,
        parts.stride(1),
        scoring.scale,
        scoring.logit_scale,
        NUM_PARTS=num_parts,
        ROWS=rows,
        LINES=power_of_two(rows),
        EXPERTS=experts,
        IS_SIGMOID=scoring.is_sigmoid,
        IS_NORMALISED=scoring.is_normalised,
        NUM_GROUPS=scoring.num_groups,
        NUM_KEPT=scoring.num_kept_groups,
        IS_EVEN=num_experts % scoring.num_groups == 0 and experts == num_experts,
        CAPACITY=scoring.capacity if scoring.window else 0,
        IS_WHOLE=is_whole,
        NUM_SHARED=num_shared,
        OVERLAPS=overlaps(logits.device),
        launch_pdl=overlaps(logits.device),
        num_warps=num_warps,
    )
    if members is not None:
        _launch_sort(members, slots, ends, num_chosen, num_shared)


def _launch_sort(
    members: Tensor, slots: Tensor, ends: Tensor, num_chosen: int, num_shared: int
) -> None:
    sort_kernel[(len(ends),)](
        members,
        slots,
        ends,
        len(members) // num_chosen,
        NUM_CHOSEN=num_chosen,
        NUM_SHARED=num_shared,
        LINES=_SORT_TILE[0],
        WIDTH=_SORT_TILE[1],
        OVERLAPS=overlaps(slots.device),
        launch_pdl=overlaps(slots.device),
        num_warps=8,
    )


def _window_elements(num_experts: int, window: int) -> int:
    return power_of_two(window) * power_of_two(num_experts)


def holds_window(num_experts: int, window: int) -> bool:
    """Whether a program of the choice can hold a window of rows; 0 means no windows."""
    return _window_elements(num_experts, window) <= _MAX_WINDOW_ELEMENTS


def _choose_block(num_rows: int, num_experts: int, window: int) -> tuple[int, int]:
    if window:
        elements = _window_elements(num_experts, window)
        return elements, max(1, elements // _WINDOW_OF_WARP)
    num_elements = num_rows * power_of_two(num_experts)
    return next(block for most, block in _CHOICES if most is None or num_elements <= most)


def launch_sum(
    terms: Tensor, weights: Tensor | None, addend: Tensor | None, out: Tensor, adds: bool
) -> None:
    """Enqueue ``out = sum`` or ``out += sum`` over terms [R, k, D]; the arguments are checked."""
    num_rows, num_terms, num_columns = terms.shape
    columns = min(1024, power_of_two(num_columns))
    sum_kernel[(num_rows, ceil(num_columns / columns))](
        terms,
        weights,
        addend,
        out,
        num_columns,
        terms.stride(0),
        0 if weights is None else weights.stride(0),
        0 if addend is None else addend.stride(0),
        out.stride(0),
        NUM_TERMS=num_terms,
        COLUMNS=columns,
        IS_WEIGHTED=weights is not None,
        HAS_ADDEND=addend is not None,
        ADDS=adds,
        OVERLAPS=overlaps(terms.device),
        launch_pdl=overlaps(terms.device),
        num_warps=4,
    )

# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels around the experts: their scores and the choice, the order of the rows, and the
final sum.

The product with the router is small, so its time is latency. It is cut along the depth into as
many programs as there are tiles, which read their part of the router while the kernel before runs
out; the kernel that chooses adds the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .overlap import begin_open, overlaps
from .scoring import Scoring


@triton.jit
def score_kernel(
    x,  # [R, D]
    gate,  # [E, D]
    parts,  # [P, R, E] fp32, written: the products of one tile of the depth each
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
    begin_open(OVERLAPS)  # what was read before is a weight, which no kernel writes
    right = tl.load(
        x + row_ids.to(tl.int64)[None, :] * x_stride + depth_ids[:, None],
        mask=is_row[None, :] & is_deep[:, None],
        other=0.0,
    )
    products = tl.dot(left, right, input_precision="ieee")
    into = (part * num_rows + row_ids).to(tl.int64)[:, None] * num_experts + experts[None, :]
    tl.store(parts + into, products.T, mask=is_row[:, None] & is_expert[None, :])


@triton.jit
def _at_least(ranks):
    """NaN is greater than nothing: as the least number its row still chooses the lowest experts."""
    return tl.where(ranks > -3.0e38, ranks, -3.0e38)


@triton.jit
def _in_kept_groups(
    ranks,
    is_expert,
    num_experts,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Mark the experts of the groups whose two best ranks sum highest; ties to the lowest group."""
    experts = tl.arange(0, EXPERTS)[None, :]
    size = num_experts // NUM_GROUPS
    groups = experts // size
    sums = tl.full(ranks.shape, float("-inf"), dtype=tl.float32)  # of each expert's group
    for group in range(NUM_GROUPS):
        members = tl.where(groups == group, ranks, float("-inf"))
        best = tl.max(members, axis=1)
        winner = tl.argmax(members, axis=1)
        second = tl.max(tl.where(experts == winner[:, None], float("-inf"), members), axis=1)
        sums = tl.where(groups == group, _at_least(best + second)[:, None], sums)
    is_open = tl.broadcast_to(is_expert[None, :], ranks.shape)
    for _ in range(NUM_KEPT):
        winner = tl.argmax(tl.where(is_open, sums, float("-inf")), axis=1)
        is_open = is_open & (groups != winner[:, None] // size)
    return is_expert[None, :] & ~is_open


@triton.jit
def _choose(ranks, can_be_chosen, num_chosen, EXPERTS: tl.constexpr):
    """Mark the num_chosen best of each row of ranks [ROWS, EXPERTS]; ties to the lowest expert."""
    experts = tl.arange(0, EXPERTS)[None, :]
    is_open = can_be_chosen
    for _ in range(num_chosen):
        winner = tl.argmax(tl.where(is_open, ranks, float("-inf")), axis=1)
        is_open = is_open & (experts != winner[:, None])
    return can_be_chosen & ~is_open


# Not specialised: Triton 3.6 fails on the loop of one turn that a constant 1 would leave.
@triton.jit(do_not_specialize=["num_chosen", "scale"])
def choose_kernel(
    logits,  # [P, R, E], to be summed and rounded to the dtype of the weights
    bias,  # [E] fp32
    weights,  # [R, K], written: ascending experts
    chosen,  # [R, E] int8, written where the rows take several blocks
    counts,  # [blocks, E] int32, written likewise
    slots,  # [R * K] int32, written where one block holds all rows
    ends,  # [E] int32, written likewise
    num_rows,
    num_experts,
    num_chosen,
    logits_stride,
    part_stride,
    scale,
    NUM_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_open(OVERLAPS)
    block = tl.program_id(0)
    row_ids = block * ROWS + tl.arange(0, ROWS)
    experts = tl.arange(0, EXPERTS)
    is_row, is_expert = row_ids < num_rows, experts < num_experts
    inside = is_row[:, None] & is_expert[None, :]
    at = row_ids.to(tl.int64)[:, None] * logits_stride + experts[None, :]
    given = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    for part in tl.static_range(1, NUM_PARTS):
        given += tl.load(logits + part * part_stride + at, mask=inside, other=float("-inf"))
    given = given.to(weights.dtype.element_ty).to(tl.float32)
    given = tl.where(is_row[:, None], given, 0.0)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-given))
    else:
        powers = tl.where(is_expert[None, :], tl.exp(given - tl.max(given, axis=1)[:, None]), 0.0)
        scores = powers / tl.sum(powers, axis=1)[:, None]
    ranks = scores
    if HAS_BIAS:
        ranks += tl.load(bias + experts, mask=is_expert, other=0.0)[None, :]
    ranks = _at_least(ranks)
    if NUM_GROUPS > 1:
        is_open = _in_kept_groups(ranks, is_expert, num_experts, NUM_GROUPS, NUM_KEPT, EXPERTS)
    else:
        is_open = tl.broadcast_to(is_expert[None, :], ranks.shape)
    is_chosen = _choose(ranks, is_open, num_chosen, EXPERTS) & is_row[:, None]
    ones = is_chosen.to(tl.int32)
    slot = row_ids[:, None] * num_chosen + tl.cumsum(ones, axis=1) - 1
    if IS_NORMALISED:
        scores /= tl.sum(tl.where(is_chosen, scores, 0.0), axis=1)[:, None] + 1e-20
    scores *= scale
    tl.store(weights + slot, scores.to(weights.dtype.element_ty), mask=is_chosen)
    totals = tl.sum(ones, axis=0)
    if IS_WHOLE:
        last = tl.cumsum(totals)
        tl.store(ends + experts, last, mask=is_expert)
        position = (last - totals)[None, :] + tl.cumsum(ones, axis=0) - 1
        tl.store(slots + position, slot, mask=is_chosen)
    else:
        at = row_ids.to(tl.int64)[:, None] * num_experts + experts[None, :]
        tl.store(chosen + at, is_chosen.to(tl.int8), mask=inside)
        tl.store(counts + block * num_experts + experts, totals, mask=is_expert)


@triton.jit
def sort_kernel(
    chosen,  # [R, E] int8
    counts,  # [blocks, E] int32
    slots,  # [R * K] int32, written
    ends,  # [E] int32, written
    num_rows,
    num_experts,
    num_chosen,
    num_blocks,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    begin_open(OVERLAPS)
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < num_experts
    totals = tl.zeros((EXPERTS,), dtype=tl.int32)
    earlier = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        some = tl.load(
            counts + blocks[:, None] * num_experts + experts[None, :],
            mask=(blocks < num_blocks)[:, None] & is_expert[None, :],
            other=0,
        )
        totals += tl.sum(some, axis=0)
        earlier += tl.sum(tl.where((blocks < block)[:, None], some, 0), axis=0)
    last = tl.cumsum(totals)
    if block == 0:
        tl.store(ends + experts, last, mask=is_expert)
    row_ids = block * ROWS + tl.arange(0, ROWS)
    ones = tl.load(
        chosen + row_ids.to(tl.int64)[:, None] * num_experts + experts[None, :],
        mask=(row_ids < num_rows)[:, None] & is_expert[None, :],
        other=0,
    ).to(tl.int32)
    slot = row_ids[:, None] * num_chosen + tl.cumsum(ones, axis=1) - 1
    position = (last - totals + earlier)[None, :] + tl.cumsum(ones, axis=0) - 1
    tl.store(slots + position, slot, mask=ones > 0)


@triton.jit
def sum_kernel(
    terms,  # [R, K, D]
    weights,  # [R, K] fp32, where the sum is one in fp32
    addend,  # [R, D]
    out,  # [R, D]
    num_columns,
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
    term = terms + row * NUM_TERMS * num_columns + columns
    total = tl.load(term, mask=mask, other=0.0).to(tl.float32)
    if IS_WEIGHTED:
        total *= tl.load(weights + row * NUM_TERMS)
    for index in tl.static_range(1, NUM_TERMS):
        more = tl.load(term + index * num_columns, mask=mask, other=0.0).to(tl.float32)
        if IS_WEIGHTED:
            total += more * tl.load(weights + row * NUM_TERMS + index)
        else:  # every sum is rounded to the model dtype
            total = (total + more).to(dtype).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if HAS_ADDEND:
        more = tl.load(addend + row * num_columns + columns, mask=mask, other=0.0)
        total = (total + more.to(tl.float32)).to(dtype).to(tl.float32)
    into = out + row * out_stride + columns
    if ADDS:
        total += tl.load(into, mask=mask, other=0.0).to(tl.float32)
    tl.store(into, total.to(dtype), mask=mask)


# Tile [experts, rows, depth] of a program of the scores. 64 rows of a matrix are one tensor-core
# instruction.
_SCORE_EXPERTS, _SCORE_ROWS, _SCORE_DEPTH = 64, 16, 256
# The most elements [rows, experts] of all rows, then those of a program of the choice, and its
# warps. Few rows a program are fewer instructions after each other; of many programs each would
# read the counts of all. On an H200, 32 and 256 rows of 64 experts: 6.8 and 7.7 us; one program of
# 32 rows, which needs no kernel for the order, 7.3; PyTorch's product before the choice 10 and 11.
_CHOICES = ((16384, (512, 4)), (65536, (1024, 4)), (None, (2048, 4)))
_COUNTS_ELEMENTS = 2048  # [programs, experts], of the counts that are read at once


def launch_score(x: Tensor, gate: Tensor) -> Tensor:
    """Enqueue the parts [P, R, E] fp32 whose sum is ``x @ gate.T``; the arguments are checked."""
    (num_rows, depth), num_experts = x.shape, len(gate)
    num_parts = triton.cdiv(depth, _SCORE_DEPTH)
    parts = x.new_empty((num_parts, num_rows, num_experts), dtype=torch.float32)
    grid = (
        triton.cdiv(num_rows, _SCORE_ROWS),
        triton.cdiv(num_experts, _SCORE_EXPERTS),
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
    scoring: Scoring,
    weights: Tensor,
    slots: Tensor,
    ends: Tensor,
    block: tuple[int, int] | None = None,
) -> None:
    """Enqueue the choice and the order of the rows; the arguments are checked.

    `logits` is [R, E], or what `launch_score` gives. `block` holds the elements and the warps of a
    program of the choice.
    """
    parts = logits if logits.dim() == 3 else logits[None]
    num_parts, num_rows, num_experts = parts.shape
    experts = triton.next_power_of_2(num_experts)
    elements, num_warps = block or _choose_block(num_rows * experts)
    rows = max(1, elements // experts)
    num_blocks = triton.cdiv(num_rows, rows)
    is_whole = num_blocks == 1
    chosen = counts = None
    if not is_whole:
        chosen = logits.new_empty((num_rows, num_experts), dtype=torch.int8)
        counts = slots.new_empty((num_blocks, num_experts))
    choose_kernel[(num_blocks,)](
        parts,
        bias,
        weights,
        chosen,
        counts,
        slots,
        ends,
        num_rows,
        num_experts,
        num_chosen,
        parts.stride(1),
        parts.stride(0),
        scoring.scale,
        NUM_PARTS=num_parts,
        ROWS=rows,
        EXPERTS=experts,
        HAS_BIAS=bias is not None,
        IS_SIGMOID=scoring.is_sigmoid,
        IS_NORMALISED=scoring.is_normalised,
        NUM_GROUPS=scoring.num_groups,
        NUM_KEPT=scoring.num_kept_groups,
        IS_WHOLE=is_whole,
        OVERLAPS=overlaps(logits.device),
        launch_pdl=overlaps(logits.device),
        num_warps=num_warps,
    )
    if is_whole:
        return
    sort_kernel[(num_blocks,)](
        chosen,
        counts,
        slots,
        ends,
        num_rows,
        num_experts,
        num_chosen,
        num_blocks,
        ROWS=rows,
        EXPERTS=experts,
        BLOCKS=max(1, _COUNTS_ELEMENTS // experts),
        OVERLAPS=overlaps(logits.device),
        launch_pdl=overlaps(logits.device),
        num_warps=4,
    )


def _choose_block(num_elements: int) -> tuple[int, int]:
    return next(block for most, block in _CHOICES if most is None or num_elements <= most)


def launch_sum(
    terms: Tensor, weights: Tensor | None, addend: Tensor | None, out: Tensor, adds: bool
) -> None:
    """Enqueue ``out = sum`` or ``out += sum`` over terms [R, k, D]; the arguments are checked."""
    num_rows, num_terms, num_columns = terms.shape
    columns = min(1024, triton.next_power_of_2(num_columns))
    sum_kernel[(num_rows, triton.cdiv(num_columns, columns))](
        terms,
        weights,
        addend,
        out,
        num_columns,
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

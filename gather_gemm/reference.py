# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of all operations; they define where results of experts are rounded."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import gelu, silu

from .scoring import SOFTMAX, Scoring

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from .low_rank import LowRank, Piece, Tiles

_LEAST = -3.0e38  # replaces NaN and -inf when experts are chosen


def gather_gemm(
    x: Tensor, rows: Tensor | None, weight: Tensor, out: Tensor | None = None
) -> Tensor:
    """Compute ``x[rows] @ weight.T``; see `gather_gemm.gather_gemm`."""
    return torch.mm(x if rows is None else x.index_select(0, rows), weight.t(), out=out)


def gather_top(
    x: Tensor,
    rows: Tensor | None,
    weight: Tensor,
    columns: Sequence[int] = (),
    forbidden: int | Tensor = 0,
    excluded: int | Tensor = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute maximum, its column, sum of exp and probability; see `gather_gemm.gather_top`."""
    logits = torch.mm(x if rows is None else x.index_select(0, rows), weight.t()).float()
    hidden = torch.zeros(2, len(logits), logits.shape[1], dtype=torch.bool, device=logits.device)
    for mask, marks in zip((forbidden, excluded), hidden, strict=True):
        bits = torch.as_tensor(mask, device=logits.device)
        for i, special in enumerate(columns):
            marks[:, special] |= (bits >> i & 1).bool()
    logits.masked_fill_(hidden[0], -torch.inf)
    maximum, column = logits.amax(dim=-1), logits.argmax(dim=-1)
    logits.masked_fill_(hidden[1], -torch.inf)
    shift = maximum.masked_fill(maximum == -torch.inf, 0.0)
    sum_exp = (logits - shift[:, None]).exp().sum(dim=-1)
    is_zero = hidden[1].gather(1, column[:, None])[:, 0] | (maximum == -torch.inf)
    probability = (1.0 / sum_exp).masked_fill(is_zero & ~sum_exp.isnan(), 0.0)
    return maximum, column, sum_exp, probability


def route(
    logits: Tensor,
    num_chosen: int,
    bias: Tensor | None,
    scoring: Scoring = SOFTMAX,
    *,
    has_shared: bool = False,
    expert_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute weights, slots and ends; see `gather_gemm.route`."""
    wide = logits.to(torch.float32) * scoring.logit_scale
    scores = wide.sigmoid() if scoring.is_sigmoid else wide.softmax(dim=-1)
    ranks = scores if bias is None else scores + bias
    ranks = torch.where(ranks > _LEAST, ranks, _LEAST)
    if scoring.num_groups > 1:
        ranks = ranks.masked_fill(~_kept_groups(ranks, scoring), -torch.inf)
    if scoring.window:
        ranks = ranks.masked_fill(~_kept_in_windows(ranks, scoring), -torch.inf)
    chosen = _best(ranks, num_chosen).sort(dim=-1).values
    weights = scores.gather(-1, chosen)
    if scoring.is_normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = weights * scoring.scale
    if expert_scales is not None:
        weights = weights * expert_scales[chosen]
    weights = weights.to(logits.dtype)
    slots = chosen.flatten().argsort(stable=True).to(torch.int32)
    ends = _group_ends(chosen, logits.shape[1])
    return _with_shared(weights, slots, ends) if has_shared else (weights, slots, ends)


def _with_shared(weights: Tensor, slots: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add an expert of all rows: it is the first expert, and the last entry of each row."""
    num_rows, num_chosen = weights.shape
    rows = torch.arange(num_rows, dtype=slots.dtype, device=slots.device)
    return (
        torch.cat((weights, weights.new_ones(num_rows, 1)), dim=1),
        torch.cat((rows * (num_chosen + 1) + num_chosen, slots + slots // num_chosen)),
        torch.cat((ends.new_full((1,), num_rows), ends + num_rows)),
    )


def _kept_groups(ranks: Tensor, scoring: Scoring) -> Tensor:
    """Mark, [R, E] bool, the experts of the groups whose two best ranks have the largest sums."""
    groups = ranks.unflatten(1, (scoring.num_groups, -1))
    sums = groups.topk(2, dim=-1).values.sum(dim=-1)
    sums = torch.where(sums > _LEAST, sums, _LEAST)
    kept = torch.zeros_like(sums, dtype=torch.bool)
    kept.scatter_(1, _best(sums, scoring.num_kept_groups), True)
    return kept.repeat_interleave(groups.shape[2], dim=1)


def _kept_in_windows(ranks: Tensor, scoring: Scoring) -> Tensor:
    """Mark, [R, E] bool, the experts that the window of each row allows."""
    num_rows, num_experts = ranks.shape
    missing = -num_rows % scoring.window
    padded = torch.nn.functional.pad(ranks, (0, 0, 0, missing), value=-torch.inf)
    scores = padded.view(-1, scoring.window, num_experts).amax(dim=1)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept.scatter_(1, _best(scores, scoring.capacity), True)
    return kept.repeat_interleave(scoring.window, dim=0)[:num_rows]


def _best(ranks: Tensor, count: int) -> Tensor:
    """Return the columns of the `count` largest numbers of each row; ties go to the lowest column.

    The sort is stable, because topk does not define the order of equal numbers.
    """
    return ranks.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _group_ends(chosen: Tensor, num_experts: int) -> Tensor:
    """Return the end [E] int32 of each expert's rows when the rows are sorted by expert.

    It sums ones instead of calling `bincount`, because `bincount` makes the host wait for a GPU.
    """
    counts = torch.zeros(num_experts, dtype=torch.int32, device=chosen.device)
    ones = torch.ones((), dtype=torch.int32, device=chosen.device)
    counts.scatter_add_(0, chosen.flatten(), ones.expand(chosen.numel()))
    return counts.cumsum(0, dtype=torch.int32)


def grouped_gemm(
    x: Tensor, weight: Tensor, ends: Tensor, weight_scales: Tensor | None = None
) -> Tensor:
    """Compute the product [S, N] of each group of rows with its own matrix, transposed."""
    out = x.new_empty(len(x), weight.shape[1])
    for group, (start, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if end == start:
            continue
        if weight_scales is None:
            torch.mm(x[start:end], weight[group].t(), out=out[start:end])
        else:
            product = torch.mm(x[start:end].float(), weight[group].float().t())
            out[start:end] = product * weight_scales[group]
    return out


def gated(gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
    """Compute silu(gate) * up of [S, 2I], or gelu, the gate's columns first, in the model dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (gelu(gate, approximate="tanh") if is_gelu else silu(gate)) * up


def weighted_terms(
    down: Tensor, slots: Tensor, weights: Tensor, *, is_weighted: bool = True
) -> Tensor:
    """Put rows [S, D], which are in the order of `slots`, back as [R, k, D], weighted by [R, k]."""
    terms = torch.empty_like(down)
    terms[slots] = down
    terms = terms.view(*weights.shape, down.shape[1])
    return terms.mul_(weights[:, :, None]) if is_weighted else terms


def sum_terms(terms: Tensor, weights: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """Sum [R, k, D] over k, first to last; see `gather_gemm.sum_terms`."""
    if weights is None:
        total = terms[:, 0].clone(memory_format=torch.contiguous_format)
        for index in range(1, terms.shape[1]):
            total.add_(terms[:, index])
    else:
        wide = torch.zeros_like(terms[:, 0], dtype=torch.float32)
        for index in range(terms.shape[1]):
            wide += terms[:, index].to(torch.float32) * weights[:, index, None]
        total = wide.to(terms.dtype)
    return total if addend is None else total.add_(addend)


def shrink(x: Tensor, down: Tensor, ranks: Tensor, tiles: Tiles[Tensor], low: Tensor) -> None:
    """Write products with the first matrices to `low`; see `gather_gemm.shrink`."""
    max_rank = down.shape[2]
    for slot, rows in _rows_of_slots(tiles, len(x)):
        for part, rank in enumerate(ranks[slot].tolist()):
            columns = slice(part * max_rank, part * max_rank + rank)
            low[0, rows, 0, columns] = torch.mm(
                x[rows].float(), down[slot, part, :rank].float().t()
            )


def place_by_slot(low: Tensor, matrices: LowRank, tiles: Tiles[Tensor], by_slot: Tensor) -> None:
    """Write `low` times scales at the places of the slots; see `gather_gemm.shrink`."""
    _, up, ranks, scales = matrices
    max_rank, num_numbers = up.shape[1], matrices.num_ranks
    by_slot.zero_()
    for slot, rows in _rows_of_slots(tiles, len(by_slot)):
        for part, rank in enumerate(ranks[slot].tolist()):
            first = part * max_rank
            scaled = scales[slot, part] * low[rows, 0, first : first + rank]
            first += slot * num_numbers
            by_slot[rows, first : first + rank] = scaled.to(by_slot.dtype)


def expand(
    low: Tensor,
    matrices: LowRank,
    tiles: Tiles[Tensor],
    out: Tensor,
    pieces: Sequence[Piece],
    base: Tensor | None = None,
    *,
    adds: bool = True,
) -> None:
    """Add the products of `low` with the second matrices; see `gather_gemm.expand`."""
    _, up, ranks, scales = matrices
    total = out.float() if adds else torch.zeros_like(out, dtype=torch.float32)
    if base is not None:
        total += base.float()
    for slot, rows in _rows_of_slots(tiles, len(out)):
        own_low = low[rows, slot if low.shape[1] > 1 else 0].to(up.dtype).float()
        for part, source, target, count in pieces:
            first, rank = part * up.shape[1], int(ranks[slot, part])
            columns = up[slot, :rank, source : source + count].float()
            product = torch.mm(own_low[:, first : first + rank], columns)
            total[rows, target : target + count] += scales[slot, part] * product
    out.copy_(total)


def gated_expand(
    low: Tensor,
    matrices: LowRank,
    tiles: Tiles[Tensor],
    gate_up: Tensor,
    out: Tensor,
    pieces: Sequence[Piece],
) -> None:
    """Write silu(gate) * up of changed products; see `gather_gemm.gated_expand`."""
    changed = gate_up.clone()
    expand(low, matrices, tiles, changed, pieces)
    out.copy_(gated(changed))


def _rows_of_slots(tiles: Tiles[Tensor], num_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield every slot and its rows of the tensors, which have `num_rows` rows."""
    rows = tiles.rows.long() - tiles.first_row
    slots = torch.full((num_rows,), -1, device=rows.device)
    for slot, first, count in tiles.table.tolist():
        own = rows[first : first + count]
        slots[own[(own >= 0) & (own < num_rows)]] = slot
    for slot in slots[slots >= 0].unique().tolist():
        yield slot, (slots == slot).nonzero()[:, 0]

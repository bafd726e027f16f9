# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of the sampling operations, and of their vocabulary-parallel form.

These define what the kernels compute, and run wherever a kernel is missing. Letters: R rows,
V columns. Logits are [R, V] bf16, fp16, fp32 or fp64; everything is computed in fp32, or in fp64
where the logits are. Of equal logits the lowest column wins. Columns may be -inf. NaN in a row
makes its score NaN and leaves its token unspecified (but in range).

A vocabulary cut over ranks, or into tiles that come one after another, is merged without ever
exchanging or keeping logits::

    records = torch.stack([partial(slice, rows, score, first_column=...) for each slice])
    merge(records, rows, score)                # token, score and greedy column of the whole row

except for the entropy's epsilon: where it matters, a second pass over each slice includes it::

    whole = join(records, rows)
    sum(entropy_share(slice, whole, rows, first_column=...) for each slice)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .filters import kept_by
from .philox import uniform
from .rows import (
    COLUMN,
    MAXIMUM,
    NOISED,
    SECOND,
    SUM_EXP,
    TOKEN,
    TOKEN_LOGIT,
    WEIGHTED,
    Rows,
    Sampled,
    Score,
)

_NOISE_TILE_COLUMNS = 8192  # bounds the memory of the noise; a multiple of 4, one counter's words


class Best(NamedTuple):
    """Largest noised logit of a slice of the columns."""

    score: Tensor  # [R] fp64
    column: Tensor  # [R] int64, counted over the whole vocabulary


def candidates(logits: Tensor, rows: Rows, score: Score) -> Sampled:
    """Sample each row: token, score and greedy column; see `flash_sample.candidates`.

    Without noise and special columns, the confidence is bit for bit ``softmax(logits.float())``
    gathered at ``argmax(logits)``, as the LLaDA reference generate loop takes it.
    """
    values = _masked(computed(logits), rows.columns, rows.forbidden, 0)
    greedy = token = values.argmax(dim=-1)
    removed = None
    if rows.filters is not None:
        removed = ~kept_by(values, rows.temperature, rows.filters)
    if rows.has_noise:
        drawn = values if removed is None else values.masked_fill(removed, -torch.inf)
        token = _noised_best(drawn, rows, 0).column
    kept = _masked(values, rows.columns, rows.excluded, 0)
    if removed is not None and rows.filters is not None and rows.filters.are_scored:
        kept = kept.masked_fill(removed, -torch.inf)
    is_empty = kept.amax(dim=-1) == -torch.inf
    if rows.is_tempered:
        kept = _tempered(kept, kept.amax(dim=-1), rows)
    probabilities = torch.softmax(kept, dim=-1)
    if score == "entropy":
        found = _entropy(probabilities, rows.epsilon).masked_fill(is_empty, torch.inf)
    elif score == "margin":
        best = probabilities.topk(min(2, probabilities.shape[1]), dim=-1).values
        found = best[:, 0] - best[:, 1] if best.shape[1] == 2 else best[:, 0]
        found = found.masked_fill(is_empty, 0.0)
    else:
        found = probabilities.gather(-1, token[:, None]).squeeze(-1).masked_fill(is_empty, 0.0)
    return Sampled(token, found, greedy)


def computed(logits: Tensor) -> Tensor:
    """Convert logits to the dtype of the arithmetic."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def gumbel_best(
    logits: Tensor,
    temperature: float | Tensor,
    seed: int | Tensor,
    step: int | Tensor,
    positions: Tensor,
    *,
    purpose: int,
    first_column: int = 0,
) -> Best:
    """Find the column with the largest ``logit - temperature * log(-log U)``: a softmax draw.

    Args:
        logits: [R, V], the columns from ``first_column`` on.
        temperature: Float, or [R]; 0 takes the largest logit.
        seed, step, positions, purpose: Keys of the noise of each row, as for `philox.uniform`.
        first_column: Column of the whole vocabulary that ``logits`` starts with.

    Returns:
        The best noised logit (fp64) and its column.
    """
    scale = temperature[:, None].double() if isinstance(temperature, Tensor) else temperature
    tiles = []
    for start in range(0, logits.shape[1], _NOISE_TILE_COLUMNS):
        tile = logits[:, start : start + _NOISE_TILE_COLUMNS].double()
        first = first_column + start
        noise = uniform(seed, purpose, step, positions, (first, first + tile.shape[1]))
        score = tile - scale * torch.log(-torch.log(noise))
        column = score.argmax(dim=-1)
        tiles.append(Best(score.gather(-1, column[:, None]).squeeze(-1), column + first))
    return _best_of(tiles)


def partial(logits: Tensor, rows: Rows, score: Score, *, first_column: int = 0) -> Tensor:
    """Reduce a slice of the columns to a record, float64 [R, 8]; see `flash_sample.partial`."""
    values = _masked(computed(logits), rows.columns, rows.forbidden, first_column)
    column = values.argmax(dim=-1)
    maximum = values.gather(-1, column[:, None]).squeeze(-1)
    shifted = _tempered(_masked(values, rows.columns, rows.excluded, first_column), maximum, rows)
    exponentials = shifted.double().exp()  # of entropies near 0, fp32 sums would leave little
    record = torch.zeros(len(logits), 8, dtype=torch.float64, device=logits.device)
    record[:, MAXIMUM] = maximum.double()
    record[:, COLUMN] = (column + first_column).double()
    record[:, SUM_EXP] = exponentials.sum(dim=-1)
    if score == "entropy":
        products = exponentials * shifted.clamp_min(-1e4)  # 0 * -inf would be NaN
        record[:, WEIGHTED] = products.sum(dim=-1)
    record[:, SECOND] = -torch.inf
    if score == "margin" and values.shape[1] > 1:
        record[:, SECOND] = values.topk(2, dim=-1).values[:, 1].double()
    best = Best(record[:, MAXIMUM], column + first_column)
    if rows.has_noise:
        best = _noised_best(values, rows, first_column)
    record[:, NOISED] = best.score
    record[:, TOKEN] = best.column.double()
    chosen = values.gather(-1, (best.column - first_column)[:, None]).squeeze(-1)
    record[:, TOKEN_LOGIT] = chosen.double()
    return record


def join(records: Tensor, rows: Rows) -> Tensor:
    """Join the records [P, R, 8] of disjoint slices into the record [R, 8] of their union."""
    maximum = records[:, :, MAXIMUM].amax(dim=0)
    column = _lowest(records[:, :, COLUMN], records[:, :, MAXIMUM] == maximum)
    noised = records[:, :, NOISED].amax(dim=0)
    is_best = records[:, :, NOISED] == noised
    token = _lowest(records[:, :, TOKEN], is_best)
    is_best = is_best & (records[:, :, TOKEN] == token)
    distance = _tempered(records[:, :, MAXIMUM].T, maximum, rows).T
    weight = distance.exp()
    sums = records[:, :, SUM_EXP]
    moved = records[:, :, WEIGHTED] + sums * distance.clamp_min(-1e4)
    is_first = (records[:, :, MAXIMUM] == maximum) & (records[:, :, COLUMN] == column)
    seconds = torch.where(is_first, records[:, :, SECOND], records[:, :, MAXIMUM])
    logits = records[:, :, TOKEN_LOGIT].masked_fill(~is_best, -torch.inf)
    return torch.stack(
        [
            maximum,
            column,
            (sums * weight).sum(dim=0),
            (moved * weight).sum(dim=0),
            seconds.amax(dim=0),
            noised,
            token,
            logits.amax(dim=0),
        ],
        dim=-1,
    )


def merge(records: Tensor, rows: Rows, score: Score) -> Sampled:
    """Merge the records [P, R, 8] of slices into token, score and greedy column of whole rows.

    The entropy is ``-sum p * log(p)``: it leaves out the epsilon.
    """
    whole = join(records, rows)
    maximum, total = whole[:, MAXIMUM], whole[:, SUM_EXP]
    token = whole[:, TOKEN].long()
    is_empty = (maximum == -torch.inf) | (total == 0)
    if score == "entropy":
        found = (total.log() - whole[:, WEIGHTED] / total).masked_fill(is_empty, torch.inf)
    else:
        other = whole[:, SECOND if score == "margin" else TOKEN_LOGIT]
        relative = _tempered(other[:, None], maximum, rows).squeeze(-1).exp()
        found = ((1 - relative if score == "margin" else relative) / total).masked_fill(
            is_empty, 0.0
        )
    if score == "confidence":
        for i, column in enumerate(rows.columns):
            is_excluded = _bit(rows.excluded, i, token.device)
            found = found.masked_fill(is_excluded & (token == column), 0.0)
    return Sampled(token, found.float(), whole[:, COLUMN].long())


def entropy_share(logits: Tensor, whole: Tensor, rows: Rows, *, first_column: int = 0) -> Tensor:
    """Compute the share [R] of a slice of the columns in the row's entropy.

    The shares of all slices add up.

    Args:
        logits: [R, V], the columns from ``first_column`` on.
        whole: [R, 8], the joined record of all columns.
        rows: Parameters with which the records were made.
        first_column: Column of the whole vocabulary that ``logits`` starts with.
    """
    values = _masked(computed(logits), rows.columns, rows.forbidden, first_column)
    kept = _masked(values, rows.columns, rows.excluded, first_column)
    maximum, total = (whole[:, field].to(values.dtype) for field in (MAXIMUM, SUM_EXP))
    probabilities = _tempered(kept, maximum, rows).exp() / total[:, None]
    share = _entropy(probabilities, rows.epsilon)
    return share.masked_fill((maximum == -torch.inf) | (total == 0), torch.inf)


def _noised_best(values: Tensor, rows: Rows, first_column: int) -> Best:
    assert rows.positions is not None
    return gumbel_best(
        values,
        rows.temperature,
        rows.seed,
        rows.step,
        rows.positions,
        purpose=rows.purpose,
        first_column=first_column,
    )


def _best_of(slices: Sequence[Best]) -> Best:
    """Return the best of several slices, in ascending order of columns; ties go to the lowest."""
    score = torch.stack([part.score for part in slices])
    column = torch.stack([part.column for part in slices])
    chosen = score.argmax(dim=0, keepdim=True)
    return Best(score.gather(0, chosen).squeeze(0), column.gather(0, chosen).squeeze(0))


def _lowest(columns: Tensor, is_candidate: Tensor) -> Tensor:
    """Return the lowest [R] of the columns [P, R] that are candidates; 0 if there is none."""
    lowest = columns.masked_fill(~is_candidate, torch.inf).amin(dim=0)
    return lowest.masked_fill(lowest == torch.inf, 0.0)


def _entropy(probabilities: Tensor, epsilon: float | Tensor) -> Tensor:
    if isinstance(epsilon, Tensor):
        epsilon = epsilon[:, None]
    return -(probabilities * torch.log(probabilities + epsilon)).sum(dim=-1)


def _bit(mask: int | Tensor, index: int, device: torch.device) -> Tensor:
    """Whether a bit is set: [R] bool, or [1]."""
    if isinstance(mask, Tensor):
        return (mask >> index & 1).bool()
    return torch.tensor([bool(mask >> index & 1)], device=device)


def _masked(
    values: Tensor, columns: Sequence[int], mask: int | Tensor, first_column: int
) -> Tensor:
    """Copy with -inf in those of ``columns`` whose bit is set, if any lies in this slice."""
    if isinstance(mask, int) and mask == 0:
        return values
    found = values
    for i, column in enumerate(columns):
        local = column - first_column
        if not 0 <= local < values.shape[1] or (isinstance(mask, int) and not mask >> i & 1):
            continue
        found = values.clone() if found is values else found
        found[:, local] = found[:, local].masked_fill(_bit(mask, i, values.device), -torch.inf)
    return found


def _tempered(values: Tensor, maximum: Tensor, rows: Rows) -> Tensor:
    """Return ``(values - maximum) / softmax temperature`` by rows; -inf stays -inf, never NaN.

    The maximum is subtracted first: a tiny temperature would otherwise turn finite logits infinite.
    """
    shifted = values - maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None]
    if not rows.is_tempered:
        return shifted
    scale = torch.as_tensor(rows.temperature, dtype=values.dtype, device=values.device)
    return shifted / torch.where(scale == 0, 1.0, scale).reshape(-1, 1)

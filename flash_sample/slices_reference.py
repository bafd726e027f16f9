# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of sampling over slices of the vocabulary: ranks, or consecutive tiles.

The slices are merged, and logits are never exchanged or kept::

    records = torch.stack([partial(slice, rows, score, first_column=...) for each slice])
    merge(records, rows, score)                # token, score and greedy column of the whole row

The merged entropy ignores the epsilon. If that matters, a second pass over each slice includes it::

    whole = join(records, rows)
    sum(entropy_share(slice, whole, rows, first_column=...) for each slice)
"""

import torch
from torch import Tensor

from .gumbel import Best, noised_best
from .reference import bit, computed, entropy, masked, tempered
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


def partial(logits: Tensor, rows: Rows, score: Score, *, first_column: int = 0) -> Tensor:
    """Reduce a slice of the columns to a record, float64 [R, 8]; see `flash_sample.partial`."""
    values = masked(computed(logits), rows.columns, rows.forbidden, first_column)
    column = values.argmax(dim=-1)
    maximum = values.gather(-1, column[:, None]).squeeze(-1)
    shifted = tempered(masked(values, rows.columns, rows.excluded, first_column), maximum, rows)
    # fp32 sums would leave few significant digits of an entropy near 0
    exponentials = shifted.double().exp()
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
        best = noised_best(values, rows, first_column)
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
    distance = tempered(records[:, :, MAXIMUM].T, maximum, rows).T
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

    The entropy is ``-sum p * log(p)``, without the epsilon.
    """
    whole = join(records, rows)
    maximum, total = whole[:, MAXIMUM], whole[:, SUM_EXP]
    token = whole[:, TOKEN].long()
    is_empty = (maximum == -torch.inf) | (total == 0)
    if score == "entropy":
        scores = (total.log() - whole[:, WEIGHTED] / total).masked_fill(is_empty, torch.inf)
    else:
        other = whole[:, SECOND if score == "margin" else TOKEN_LOGIT]
        relative = tempered(other[:, None], maximum, rows).squeeze(-1).exp()
        scores = ((1 - relative if score == "margin" else relative) / total).masked_fill(
            is_empty, 0.0
        )
    if score == "confidence":
        for i, column in enumerate(rows.columns):
            is_excluded = bit(rows.excluded, i, token.device)
            scores = scores.masked_fill(is_excluded & (token == column), 0.0)
    return Sampled(token, scores.float(), whole[:, COLUMN].long())


def entropy_share(logits: Tensor, whole: Tensor, rows: Rows, *, first_column: int = 0) -> Tensor:
    """Compute the share [R] of a slice of the columns in the row's entropy.

    The shares of all slices add up.

    Args:
        logits: [R, V], the columns from ``first_column`` on.
        whole: [R, 8], the joined record of all columns.
        rows: Parameters with which the records were made.
        first_column: Column of the whole vocabulary that ``logits`` starts with.
    """
    values = masked(computed(logits), rows.columns, rows.forbidden, first_column)
    kept = masked(values, rows.columns, rows.excluded, first_column)
    maximum, total = (whole[:, field].to(values.dtype) for field in (MAXIMUM, SUM_EXP))
    probabilities = tempered(kept, maximum, rows).exp() / total[:, None]
    share = entropy(probabilities, rows.epsilon)
    return share.masked_fill((maximum == -torch.inf) | (total == 0), torch.inf)


def _lowest(columns: Tensor, is_candidate: Tensor) -> Tensor:
    """Return the lowest [R] of the columns [P, R] that are candidates; 0 if there is none."""
    lowest = columns.masked_fill(~is_candidate, torch.inf).amin(dim=0)
    return lowest.masked_fill(lowest == torch.inf, 0.0)

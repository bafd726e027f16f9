# SPDX-License-Identifier: Apache-2.0
"""The filters min-p, top-k and top-p of a distribution, and their PyTorch reference."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Filters:
    """Filters that remove columns of each row's distribution before its token is sampled.

    A column is kept if its logit is close enough to the largest one; the difference is computed in
    the dtype of the arithmetic. Among columns at the same distance `min_p` and `top_k` keep all or
    none, and `top_p` keeps the lowest columns. The best column is always kept. Numbers may be
    tensors with one value per row, as in `Rows`.

    Attributes:
        min_p: floating [R]; keeps columns with at least this share of the best column's
            probability. 0 keeps all. It is applied first.
        top_k: int64 [R]; keeps the k most likely columns, and ties with the k-th. 0 keeps all.
        top_p: floating [R]; keeps a column if the sum of the columns before it (more likely, or
            equally likely and lower) is smaller than this. 1 keeps all.
        is_top_p_first: whether top_p sums over the distribution before top_k; otherwise over the
            columns that top_k keeps.
        keeps_equal: whether a column stays if the sum of the columns before it equals top_p.
        are_scored: whether scores are computed over the kept columns; otherwise over the whole row.
    """

    min_p: float | Tensor = 0.0
    top_k: int | Tensor = 0
    top_p: float | Tensor = 1.0
    is_top_p_first: bool = False
    keeps_equal: bool = False
    are_scored: bool = False


def kept_by(values: Tensor, temperature: float | Tensor, filters: Filters) -> Tensor:
    """Return a mask of the columns that filters keep, bool [R, V].

    Args:
        values: [R, V] logits, fp32 or fp64.
        temperature: Float, or [R]; at 0 the distribution is that of temperature 1.
        filters: Filters to apply.
    """
    best = values.amax(dim=-1, keepdim=True)
    distance = best.masked_fill(best == -torch.inf, 0.0) - values
    scale = torch.as_tensor(temperature, dtype=torch.float64, device=values.device)
    scale = torch.where(scale > 0, scale, 1.0).reshape(-1, 1)
    # Sort by distance from the best column, ties by column; `before` is the weight before each
    # column.
    ordered, columns = distance.sort(dim=-1, stable=True)
    weights = (-ordered.double() / scale).exp()
    before = weights.cumsum(dim=-1) - weights
    min_p = _column(filters.min_p, values.device)
    stays = ordered.double() <= -min_p.log() * scale
    top_k = _column(filters.top_k, values.device)
    last = (top_k.long() - 1).clamp(0, values.shape[1] - 1).expand(len(values), 1)
    within_k = (ordered <= ordered.gather(1, last)) | (top_k <= 0)
    summed = stays if filters.is_top_p_first else stays & within_k
    top_p = _column(filters.top_p, values.device)
    limit = top_p * (weights * summed).sum(dim=-1, keepdim=True)
    within_p = (before <= limit if filters.keeps_equal else before < limit) | (top_p >= 1)
    stays = stays & within_k & within_p
    stays[:, 0] = True
    return torch.zeros_like(stays).scatter(1, columns, stays)


def _column(value: float | Tensor, device: torch.device) -> Tensor:
    """Convert one number, or [R], to float64 [1, 1] or [R, 1]."""
    return torch.as_tensor(value, dtype=torch.float64, device=device).reshape(-1, 1)

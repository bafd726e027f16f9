# SPDX-License-Identifier: Apache-2.0
"""Filters of a distribution before its draw, min-p, top-k and top-p, and their reference."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Filters:
    """What is cut off each row's distribution at its temperature before its token is drawn.

    A column is kept by how far its logit lies below the largest one, a difference in the dtype of
    the arithmetic. Of columns at one distance `min_p` and `top_k` keep all or none, `top_p` the
    lowest ones. The best column always stays. Numbers may be tensors of one value a row, as in
    `Rows`.

    Attributes:
        min_p: floating [R]; keeps what has at least this share of the best column's probability.
            0 keeps all. It comes first.
        top_k: int64 [R]; keeps what is at least as likely as the k-th. 0 keeps all.
        top_p: floating [R]; keeps a column while the sum of those before it, more likely or lower
            of equals, is smaller than this. 1 keeps all.
        is_top_p_first: whether sums are of the distribution before top_k; else of what it leaves.
        keeps_equal: whether a column stays where the sum of those before it is just top_p.
        are_scored: whether scores are those of what is left; else those of the whole row.
    """

    min_p: float | Tensor = 0.0
    top_k: int | Tensor = 0
    top_p: float | Tensor = 1.0
    is_top_p_first: bool = False
    keeps_equal: bool = False
    are_scored: bool = False


def kept_by(values: Tensor, temperature: float | Tensor, filters: Filters) -> Tensor:
    """Find the columns that filters keep, bool [R, V].

    Args:
        values: [R, V] logits, fp32 or fp64.
        temperature: Float, or [R]; at 0 the distribution is that of temperature 1.
        filters: What to cut off.
    """
    best = values.amax(dim=-1, keepdim=True)
    distance = best.masked_fill(best == -torch.inf, 0.0) - values
    scale = torch.as_tensor(temperature, dtype=torch.float64, device=values.device)
    scale = torch.where(scale > 0, scale, 1.0).reshape(-1, 1)
    # From the best column on, and the lowest of equals: distance, and weight before each column.
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

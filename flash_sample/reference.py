# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of the sampling operations, and of their vocabulary-parallel form.

These define what the kernels compute, and run wherever a kernel is missing. Letters: R rows,
V columns. Logits are [R, V] bf16, fp16, fp32 or fp64; everything is computed in fp32, or in fp64
where the logits are. Of equal logits the lowest column wins. Columns may be -inf. NaN in a row
makes its confidence or entropy NaN and leaves its token unspecified (but in range).

A vocabulary cut over ranks is merged without ever exchanging logits::

    parts = [partial(logits_of_rank, first_column=...) for each rank]
    whole = merge(parts)                       # best column, its logit, sum of exp
    confidence(whole)                          # = low_confidence of the whole row
    sum(entropy_share(logits_of_rank, whole, epsilon=...) for each rank)   # = its entropy
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .philox import TOKEN_NOISE, uniform

_NOISE_TILE_COLUMNS = 8192  # bounds the memory of the noise; a multiple of 4, one counter's words


class Partial(NamedTuple):
    """What a slice of the columns tells about its softmax."""

    maximum: Tensor  # [R] fp32, largest logit
    column: Tensor  # [R] int64, lowest column of that logit, counted over the whole vocabulary
    sum_exp: Tensor  # [R] fp32, sum of exp((logit - maximum) / temperature)


class Best(NamedTuple):
    """The largest score of a slice of the columns."""

    score: Tensor  # [R] fp64
    column: Tensor  # [R] int64, counted over the whole vocabulary


def low_confidence(logits: Tensor, *, excluded: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Best column of each row and its softmax probability; see `flash_sample.low_confidence`.

    Bit for bit ``softmax(logits.float())`` gathered at ``argmax(logits)``, as the LLaDA reference
    generate loop takes it, where nothing is excluded and the row has a finite logit.
    """
    kept = _without(_computed(logits), excluded)
    token = logits.argmax(dim=-1)
    confidence = torch.softmax(kept, dim=-1).gather(-1, token[:, None]).squeeze(-1)
    # The softmax of a row with nothing in it is 0 / 0; such a row says nothing for its token.
    return token, confidence.masked_fill(kept.amax(dim=-1) == -torch.inf, 0.0)


def entropy(logits: Tensor, *, epsilon: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Best column of each row and its entropy; see `flash_sample.entropy`."""
    return logits.argmax(dim=-1), _entropy(_computed(logits), epsilon)


def entropy_witht(
    logits: Tensor,
    temperature: float | Tensor,
    seed: int | Tensor,
    step: int | Tensor,
    positions: Tensor,
    *,
    purpose: int = TOKEN_NOISE,
    epsilon: float = 1e-10,
) -> tuple[Tensor, Tensor]:
    """Sampled column of each row and its entropy; see `flash_sample.entropy_witht`."""
    best = gumbel_best(logits, temperature, seed, step, positions, purpose=purpose)
    values = _computed(logits)
    return best.column, _entropy(_tempered(values, values.amax(dim=-1), temperature), epsilon)


def gumbel_best(
    logits: Tensor,
    temperature: float | Tensor,
    seed: int | Tensor,
    step: int | Tensor,
    positions: Tensor,
    *,
    purpose: int = TOKEN_NOISE,
    first_column: int = 0,
) -> Best:
    """Column with the largest ``logit - temperature * log(-log U)``: a draw from the softmax.

    Args:
        logits: [R, V], the columns from ``first_column`` on.
        temperature: Float, or [R]; 0 takes the largest logit.
        seed, step, positions, purpose: The noise of each row, as `philox.uniform` takes them.
        first_column: Column of the whole vocabulary that ``logits`` starts with.

    Returns:
        The best noised score (fp64) and its column; `merge_best` joins those of several slices.
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
    return merge_best(tiles)


def merge_best(slices: Sequence[Best]) -> Best:
    """Best of several slices, in ascending order of their columns; ties go to the lowest."""
    score = torch.stack([part.score for part in slices])
    column = torch.stack([part.column for part in slices])
    chosen = score.argmax(dim=0, keepdim=True)
    return Best(score.gather(0, chosen).squeeze(0), column.gather(0, chosen).squeeze(0))


def partial(
    logits: Tensor,
    *,
    first_column: int = 0,
    excluded: Sequence[int] = (),
    temperature: float | Tensor | None = None,
) -> Partial:
    """Partial softmax of a slice of the columns.

    Args:
        logits: [R, V], the columns from ``first_column`` on.
        first_column: Column of the whole vocabulary that ``logits`` starts with.
        excluded: Columns of the whole vocabulary that are left out of the sum; those outside this
            slice are ignored.
        temperature: Of the softmax, float or [R]; None or 0 mean 1.
    """
    values = _computed(logits)
    column = values.argmax(dim=-1)
    maximum = values.gather(-1, column[:, None]).squeeze(-1)
    last_column = first_column + logits.shape[1]
    local = [c - first_column for c in excluded if first_column <= c < last_column]
    kept = _tempered(_without(values, local), maximum, temperature)
    return Partial(maximum, column + first_column, kept.exp().sum(dim=-1))


def merge(partials: Sequence[Partial], *, temperature: float | Tensor | None = None) -> Partial:
    """Partial softmax of the union of disjoint slices, given with the same temperature."""
    maxima = torch.stack([part.maximum for part in partials])
    columns = torch.stack([part.column for part in partials])
    sums = torch.stack([part.sum_exp for part in partials])
    maximum = maxima.amax(dim=0)
    is_best = (maxima == maximum) | maximum.isnan()
    column = columns.masked_fill(~is_best, torch.iinfo(torch.int64).max).amin(dim=0)
    weights = _tempered(maxima.T, maximum, temperature).T.exp()
    return Partial(maximum, column, (sums * weights).sum(dim=0))


def confidence(whole: Partial, *, excluded: Sequence[int] = ()) -> Tensor:
    """Softmax probability [R] of the best column, from the merged partial of all columns.

    It is 0 where the best column is excluded or no column is finite.
    """
    is_zero = whole.maximum == -torch.inf
    for column in excluded:
        is_zero = is_zero | (whole.column == column)
    return (1.0 / whole.sum_exp).masked_fill(is_zero & ~whole.sum_exp.isnan(), 0.0)


def entropy_share(
    logits: Tensor,
    whole: Partial,
    *,
    epsilon: float = 1e-10,
    temperature: float | Tensor | None = None,
) -> Tensor:
    """Share [R] of a slice of the columns in the row's entropy; the shares of all slices add up.

    Args:
        logits: [R, V], a slice of the columns.
        whole: Merged partial of all columns, of the same temperature, nothing excluded.
        epsilon: As in `flash_sample.entropy`.
        temperature: As in `partial`.
    """
    shifted = _tempered(_computed(logits), whole.maximum, temperature)
    probabilities = shifted.exp() / whole.sum_exp[:, None]
    share = -(probabilities * torch.log(probabilities + epsilon)).sum(dim=-1)
    return share.masked_fill(whole.maximum == -torch.inf, torch.inf)


def _entropy(values: Tensor, epsilon: float) -> Tensor:
    probabilities = torch.softmax(values, dim=-1)
    result = -(probabilities * torch.log(probabilities + epsilon)).sum(dim=-1)
    return result.masked_fill(values.amax(dim=-1) == -torch.inf, torch.inf)


def _computed(logits: Tensor) -> Tensor:
    """Logits in the dtype of the arithmetic."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _without(values: Tensor, columns: Sequence[int]) -> Tensor:
    if not columns:
        return values
    return values.index_fill(-1, torch.tensor(list(columns), device=values.device), -torch.inf)


def _tempered(values: Tensor, maximum: Tensor, temperature: float | Tensor | None) -> Tensor:
    """``(values - maximum) / temperature`` by rows; -inf stays -inf and never becomes NaN.

    The maximum goes first: a tiny temperature would otherwise carry finite logits to infinity.
    """
    shifted = values - maximum.masked_fill(maximum == -torch.inf, 0.0)[:, None]
    if temperature is None:
        return shifted
    scale = torch.as_tensor(temperature, dtype=values.dtype, device=values.device)
    return shifted / torch.where(scale == 0, 1.0, scale).reshape(-1, 1)

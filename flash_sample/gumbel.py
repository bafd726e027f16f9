# SPDX-License-Identifier: Apache-2.0
"""Sampling by Gumbel noise in PyTorch, for rows with a temperature above 0."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .philox import uniform
from .rows import Rows

# Bounds the memory of the noise. It is a multiple of 4, because a counter gives four words.
_NOISE_TILE_COLUMNS = 8192


class Best(NamedTuple):
    """The largest noised logit of a slice of the columns, and its column."""

    score: Tensor  # [R] fp64
    column: Tensor  # [R] int64, counted over the whole vocabulary


def noised_best(values: Tensor, rows: Rows, first_column: int) -> Best:
    """Find the column with the largest ``logit - temperature * log(-log U)``: a softmax draw.

    Args:
        values: [R, V] logits, the columns from ``first_column`` on.
        rows: Temperature of each row (0 takes the largest logit), and the keys of its noise.
        first_column: Column of the whole vocabulary that ``values`` starts with.

    Returns:
        The best noised logit (fp64) and its column.
    """
    assert rows.positions is not None
    scale = rows.temperature
    if isinstance(scale, Tensor):
        scale = scale[:, None].double()
    tiles = []
    for start in range(0, values.shape[1], _NOISE_TILE_COLUMNS):
        tile = values[:, start : start + _NOISE_TILE_COLUMNS].double()
        first = first_column + start
        columns = first, first + tile.shape[1]
        noise = uniform(rows.seed, rows.purpose, rows.step, rows.positions, columns)
        score = tile - scale * torch.log(-torch.log(noise))
        column = score.argmax(dim=-1)
        tiles.append(Best(score.gather(-1, column[:, None]).squeeze(-1), column + first))
    return _best_of(tiles)


def _best_of(slices: Sequence[Best]) -> Best:
    """Return the best of several slices, in ascending order of columns; ties go to the lowest."""
    score = torch.stack([part.score for part in slices])
    column = torch.stack([part.column for part in slices])
    chosen = score.argmax(dim=0, keepdim=True)
    return Best(score.gather(0, chosen).squeeze(0), column.gather(0, chosen).squeeze(0))

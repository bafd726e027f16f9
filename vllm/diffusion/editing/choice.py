# SPDX-License-Identifier: Apache-2.0
"""Scores of a text's tokens, and the choice of the tokens to mask again.

A model that was trained to predict masks gives a token that it reads an arbitrary probability. So
every token is scored in a copy of the text in which it is masked. With S stripes there are S
copies, and copy s masks every S-th position from s on.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]

# `benchmarks/draft_scores.py`: 2 to 16 stripes find wrong tokens equally well.
NUM_STRIPES = 4


class StripedScores:
    """Log probabilities of tokens, each from the copy in which the token is masked.

    Args:
        positions: [N] int64, ascending, at least one: the tokens to score.
        num_stripes: number of copies, unless there are fewer positions.

    Attributes:
        positions: the same.
        pending: positions of each copy that is not computed yet.
        logprobs: [N] float64; NaN until a copy is computed.
    """

    def __init__(self, positions: Array, num_stripes: int = NUM_STRIPES) -> None:
        self.positions = positions
        count = min(num_stripes, positions.size)
        self.pending: list[Array] = [positions[stripe::count] for stripe in range(count)]
        self.logprobs = np.full(positions.size, np.nan)

    def note(self, positions: Array, logprobs: Array) -> None:
        """Record the log probabilities [R] of one copy, whose masks are at `positions` [R]."""
        self.pending = [stripe for stripe in self.pending if stripe[0] != positions[0]]
        count = np.searchsorted(positions, self.positions[-1], side="right")
        self.logprobs[np.searchsorted(self.positions, positions[:count])] = logprobs[:count]

    def cut(self, stop: int) -> None:
        """Score only positions below `stop`, of which there is at least one."""
        count = np.searchsorted(self.positions, stop)
        self.positions, self.logprobs = self.positions[:count], self.logprobs[:count]
        self.pending = [stripe[stripe < stop] for stripe in self.pending if stripe[0] < stop]


def choose(
    logprobs: Array,
    *,
    noise: float | None = None,
    most: int | None = None,
    threshold: float | None = None,
    budget: int | None = None,
    is_free: Array | None = None,
) -> Array:
    """Return the indices, ascending, of the tokens to mask again.

    Both limits hold if both are given. If two tokens are equally likely, the earlier one is chosen
    first.

    Args:
        logprobs: [N] log probabilities of the tokens.
        noise: largest share of the tokens, rounded up.
        most: largest number of tokens.
        threshold: probability that a token must be below.
        budget: most tokens to choose, apart from free ones.
        is_free: [N] bool, tokens that do not count.
    """
    order: Array = np.argsort(logprobs, kind="stable")
    if noise is not None:
        order = order[: math.ceil(noise * len(order))]
    order = order[:most]
    if threshold is not None:
        order = order[np.exp(logprobs[order]) < threshold]
    if budget is not None:
        counts = np.ones(len(order), dtype=np.bool_) if is_free is None else ~is_free[order]
        order = order[~counts | (counts.cumsum() <= budget)]
    order.sort()
    return order

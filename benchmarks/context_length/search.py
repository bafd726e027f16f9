# SPDX-License-Identifier: Apache-2.0
"""Which lengths to try: linear steps up to the first failure, then bisection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Range:
    """The lengths of a search, in tokens.

    Attributes:
        start, step, maximum: the linear part, `maximum` included where a step meets it.
        precision: the bisection ends when success and failure are no further apart.
    """

    start: int
    step: int
    maximum: int
    precision: int

    @property
    def lengths(self) -> range:
        """The lengths of the linear part."""
        return range(self.start, self.maximum + 1, self.step)


@dataclass(frozen=True)
class Found:
    """The longest length that runs and the shortest known to fail; None where there is none."""

    longest: int | None
    failure: int | None


def search(tried: Range, runs: Callable[[int, int], bool]) -> Found:
    """Find the longest length that runs, taking it that all shorter ones do.

    Without a failure there is no bisection, and without a success nothing to bisect.

    Args:
        tried: the lengths.
        runs: whether a length runs; also told how many lengths may come from here on, itself
            included, in this part of the search.
    """
    longest = failure = None
    for index, length in enumerate(tried.lengths):
        if not runs(length, len(tried.lengths) - index):
            failure = length
            break
        longest = length
    if longest is None or failure is None:
        return Found(longest, failure)
    while failure - longest > tried.precision:
        left = math.ceil(math.log2((failure - longest) / tried.precision))
        middle = (longest + failure) // 2
        if runs(middle, left):
            longest = middle
        else:
            failure = middle
    return Found(longest, failure)

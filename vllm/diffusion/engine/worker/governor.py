# SPDX-License-Identifier: Apache-2.0
"""How many guesses stand beside a step: those that save more time than their rows take.

Two tables say so: how often guesses hold, which is learned, and how long a step of so many rows
takes. Both depend on counts alone, never on a clock, so all ranks decide alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from vllm.diffusion.ops import Array

MARGIN = 0.02  # of a step's time, for a guess: drafting and accepting it are work of the host
FADES = 0.98  # what is left of a try after the next one of its kind
PRIOR_TRIES = 2.0  # which held every second time

# What guesses of a kind have in common: the algorithm, how much it commits, the cache, noise.
Kind: TypeAlias = "Hashable"


class HoldingRates:
    """How often guesses have held, by kind, by depth and by the number of candidates committed."""

    def __init__(self) -> None:
        self._known: dict[tuple[Kind, int | None, int], tuple[float, float]] = {}

    def forget(self) -> None:
        """Forget all that was learned."""
        self._known.clear()

    def chance(self, kind: Kind, count: int | None, depth: int) -> float:
        """Return how often a guess holds whose parent does.

        A depth that was never tried counts as the one before it. `count` is None where the rule
        says how many candidates are committed.
        """
        hits, tries = self._counts(kind, count, depth)
        return hits / tries

    def _counts(self, kind: Kind, count: int | None, depth: int) -> tuple[float, float]:
        for known in range(depth, 0, -1):
            found = self._known.get((kind, count, known))
            if found is not None:
                return found
        return PRIOR_TRIES * 0.5 ** (count or 1), PRIOR_TRIES

    def learn(self, kind: Kind, count: int | None, depth: int, *, holds: bool) -> None:
        """Take in whether a guess has held whose parent has."""
        hits, tries = self._counts(kind, count, depth)
        self._known[kind, count, depth] = hits * FADES + holds, tries * FADES + 1


class Offer(NamedTuple):
    """Guesses that a request could have.

    Attributes:
        chances: chance of each to be reached, descending.
        rows: rows of each.
    """

    chances: Sequence[float]
    rows: int


class StepTimes(NamedTuple):
    """Time of a step by its rows, which count as the next larger size.

    Attributes:
        rows: [N] int64, sizes, ascending.
        seconds: [N + 1] float64, their times; the last is that of more rows.
    """

    rows: Array
    seconds: Array

    @classmethod
    def of(cls, known: Mapping[int, float]) -> StepTimes:
        """Make the table of known times; a step of more rows is never worth it."""
        rows = sorted(known)
        return cls(np.array(rows), np.array([*(known[size] for size in rows), np.inf]))

    def at(self, rows: Array | int) -> Array:
        """Return the times [R] of steps of so many rows."""
        found: Array = self.seconds[self.rows.searchsorted(rows)]
        return found


def worthwhile(
    offers: Sequence[Offer], num_requests: int, rows: int, times: StepTimes
) -> list[int]:
    """Return how many of its first guesses each request should have.

    Of the guesses of all requests, the likeliest first, as many are taken as make the steps that
    are expected to be committed in a second the most.

    Args:
        offers: what requests could have.
        num_requests: requests of the step.
        rows: its rows without guesses.
        times: times of steps.
    """
    sizes = [len(offer.chances) for offer in offers]
    owners = np.repeat(np.arange(len(offers)), sizes)
    alone_s = float(times.at(rows))
    if not owners.size or alone_s == np.inf:
        return [0] * len(offers)
    chances = np.concatenate([offer.chances for offer in offers])
    order = (-chances).argsort(kind="stable")
    all_rows = rows + np.repeat([offer.rows for offer in offers], sizes)[order].cumsum()
    seconds = times.at(all_rows) + MARGIN * alone_s * np.arange(1, order.size + 1)
    paces = (num_requests + chances[order].cumsum()) / seconds
    best = int(paces.argmax())
    if not paces[best] * alone_s > num_requests:
        return [0] * len(offers)
    counts: list[int] = np.bincount(owners[order[: best + 1]], minlength=len(offers)).tolist()
    return counts

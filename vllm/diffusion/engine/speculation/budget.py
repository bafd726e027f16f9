# SPDX-License-Identifier: Apache-2.0
"""Chooses how many drafts to verify per step: as many as save more time than their rows take.

Two tables decide: the acceptance rates, which are learned, and the time of a step by its number of
rows. Both depend on counts alone, never on a clock, so all ranks make the same decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from vllm.diffusion.engine.step_times import StepTimes

# Share of a step's time that each draft costs, because the host drafts and accepts.
MARGIN = 0.02
DECAY = 0.98  # weight of an old trial relative to the next one
PRIOR_COUNT = 2.0  # prior trials, half of them accepted

# Drafts of one kind share the algorithm, the number of tokens per commit, the cache and the noise.
Kind: TypeAlias = "Hashable"


class AcceptanceRates:
    """Acceptance rates of drafts, by kind, depth and number of committed candidates."""

    def __init__(self) -> None:
        self._known: dict[tuple[Kind, int | None, int], tuple[float, float]] = {}

    def clear(self) -> None:
        """Forget all counts."""
        self._known.clear()

    def chance(self, kind: Kind, count: int | None, depth: int) -> float:
        """Return the acceptance rate of drafts whose parent was accepted.

        A depth without trials has the rate of the next smaller depth. `count` is None if the rule
        decides how many candidates it commits.
        """
        accepted, trials = self._counts(kind, count, depth)
        return accepted / trials

    def _counts(self, kind: Kind, count: int | None, depth: int) -> tuple[float, float]:
        for known_depth in range(depth, 0, -1):
            counts = self._known.get((kind, count, known_depth))
            if counts is not None:
                return counts
        return PRIOR_COUNT * 0.5 ** (count or 1), PRIOR_COUNT

    def learn(self, kind: Kind, count: int | None, depth: int, *, is_accepted: bool) -> None:
        """Record whether a draft was accepted, given that its parent was accepted."""
        accepted, trials = self._counts(kind, count, depth)
        self._known[kind, count, depth] = accepted * DECAY + is_accepted, trials * DECAY + 1


class DraftOffer(NamedTuple):
    """The drafts that a request could have.

    Attributes:
        chances: chance of each draft to be reached, descending.
        rows: number of rows of each draft.
    """

    chances: Sequence[float]
    rows: int


def choose_num_drafts(
    offers: Sequence[DraftOffer], num_requests: int, rows: int, times: StepTimes
) -> list[int]:
    """Return the number of drafts of each request, which are always its first ones.

    Takes drafts of all requests in descending order of chance, up to the number that maximises the
    expected number of committed steps per second.

    Args:
        offers: the drafts that requests could have.
        num_requests: number of requests of the step.
        rows: number of rows without drafts.
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
    rates = (num_requests + chances[order].cumsum()) / seconds
    best = int(rates.argmax())
    if not rates[best] * alone_s > num_requests:
        return [0] * len(offers)
    counts: list[int] = np.bincount(owners[order[: best + 1]], minlength=len(offers)).tolist()
    return counts

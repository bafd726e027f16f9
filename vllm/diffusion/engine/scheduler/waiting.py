# SPDX-License-Identifier: Apache-2.0
"""Admission: requests wait in order of arrival until their steps fit beside those that run.

Requests with a lower priority number come before all others.

A request that would not fit alone is refused. One that does not fit now lets later ones that do
pass, at most `MAX_OVERTAKEN` of them: then everybody waits until it has started. So small requests
do not wait for room that only a large one needs, and no stream of small ones can keep a large one
out.

Requests of one likelihood call start together: they arrive one by one and are to share a step.
"""

from __future__ import annotations

import time
from collections import deque
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core.errors import ActivationBudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from vllm.diffusion.engine.scheduler.request_state import RequestState, WaitsFor
    from vllm.diffusion.memory import Planner

MAX_OVERTAKEN = 16  # requests that may start before one that came earlier
MAX_PASSED = 16  # waiting requests that do not fit and are looked past in one step
LONGEST_WAIT_S = 0.05  # of readings that are here for those of their call that are not


class WaitingLine:
    """Queue of the requests that have not started, by priority, then by order of arrival.

    Args:
        max_running: requests that may run at once.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._waiting: deque[RequestState] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._waiting)

    def append(self, item: RequestState) -> None:
        behind = sum(1 for other in self._waiting if other.priority > item.priority)
        self._waiting.insert(len(self._waiting) - behind, item)

    def remove(self, item: RequestState) -> None:
        self._waiting.remove(item)

    def admit(
        self,
        running: Collection[RequestState],
        planner: Planner,
        has_pages: Callable[[RequestState], bool] = lambda _: True,
        is_long: Callable[[RequestState], bool] = lambda _: False,
        waits: Callable[[RequestState], WaitsFor | None] = lambda _: None,
    ) -> Iterator[tuple[RequestState, ActivationBudgetError | None]]:
        """Remove and yield the requests that start now, and those that never can, with the reason.

        Args:
            running: the requests that run; the caller adds each request that starts before it asks
                for the next one.
            planner: decides what fits.
            has_pages: reserves the pages of a request that may start; False if there are too few.
            is_long: whether all steps of a request come in slices, so that it shares none.
            waits: what a request waits for other than room, if anything; a later request that
                starts meanwhile does not count as overtaking it.

        Every request that stays has the reason in its `waits_for`.
        """
        passed: list[RequestState] = []  # came earlier, do not fit now; the first was passed most
        is_long = cache(is_long)  # each of these is asked about again for everybody who waits
        for item in self._waiting:
            item.waits_for = "order"
        for item in list(self._waiting):
            if passed and passed[0].num_overtaken >= MAX_OVERTAKEN:
                return
            other = waits(item)
            if other is not None:
                item.waits_for = other
                continue
            error = _refusal(item, planner)
            if error is None:
                found = self._obstacle(item, running, planner, is_long)
                found = found or (None if has_pages(item) else "memory")
                if found is not None:
                    item.waits_for = found
                    passed.append(item)
                    if len(passed) == MAX_PASSED:
                        return
                    continue
            self._waiting.remove(item)
            if error is None:
                for earlier in passed:
                    earlier.num_overtaken += 1
            yield item, error

    def _obstacle(
        self,
        item: RequestState,
        running: Collection[RequestState],
        planner: Planner,
        is_long: Callable[[RequestState], bool],
    ) -> WaitsFor | None:
        """Return what keeps a request from joining those that run, None if nothing does."""
        if not running:
            return None
        if item.params.force_single_batch or any(r.params.force_single_batch for r in running):
            return "others"
        if len(running) >= self._max_running:
            return "requests"
        long = {other.demand for other in (*running, item) if is_long(other)}
        return planner.obstacle([r.demand for r in running], item.demand, long=long)


def _refusal(item: RequestState, planner: Planner) -> ActivationBudgetError | None:
    """Return why a request would not fit even alone; else decide where it keeps what."""
    try:
        item.demand = planner.check(item.demand)
    except ActivationBudgetError as error:
        return error
    return None


class _Call(NamedTuple):
    """A likelihood call of which some requests have not arrived."""

    num_arrived: int
    since: float


class Gathering:
    """Says which requests still wait for others of their call.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: dict[str, _Call] = {}

    def arrived(self, item: RequestState) -> None:
        """Count a request that has arrived toward its call."""
        score = item.params.score
        if score is None or score.group_size == 1:
            return
        self._forget_late()
        group = self._groups.pop(score.group, _Call(0, self._clock()))
        if group.num_arrived + 1 < score.group_size:
            self._groups[score.group] = group._replace(num_arrived=group.num_arrived + 1)

    def waits(self, item: RequestState) -> bool:
        """Whether requests of the same call are missing, for at most `LONGEST_WAIT_S`."""
        self._forget_late()
        return item.params.score is not None and item.params.score.group in self._groups

    def _forget_late(self) -> None:
        late = self._clock() - LONGEST_WAIT_S
        self._groups = {name: g for name, g in self._groups.items() if g.since > late}

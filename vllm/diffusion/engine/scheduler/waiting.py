# SPDX-License-Identifier: Apache-2.0
"""Waiting requests: they start in order of arrival, once they fit together with running requests.

Requests with a lower priority number come before all others.

A request that would not fit alone is refused. Later requests may overtake a request that does not
fit now, at most `MAX_OVERTAKEN` of them; after that, all later requests wait until it has
started. So small requests do not wait for memory that only a large request needs, and a stream of
small requests cannot block a large one forever.
"""

from __future__ import annotations

from bisect import insort, insort_left
from functools import cache
from typing import TYPE_CHECKING

from vllm.diffusion.core.errors import ActivationBudgetError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from vllm.diffusion.engine.scheduler.request_state import RequestState, WaitsFor
    from vllm.diffusion.memory import Admission

MAX_OVERTAKEN = 16  # maximum number of later requests that may start before a request
MAX_PASSED = 16  # maximum number of waiting requests that are skipped in one step


class WaitingLine:
    """Queue of the requests that have not started, by priority, then by order of arrival.

    Args:
        max_running: requests that may run at once.

    Attributes:
        by_id: the waiting requests by their ids; read only. Usually an id has one request.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._line: list[RequestState] = []  # may still contain requests in `_left`
        self._left: set[RequestState] = set()
        self.by_id: dict[str, list[RequestState]] = {}
        self._gated: dict[RequestState, None] = {}  # requests that a gate has accepted
        # Requests whose `waits_for` the last call has set.
        self._with_reason: dict[RequestState, None] = {}

    def __len__(self) -> int:
        return len(self._line) - len(self._left)

    @property
    def requests(self) -> list[RequestState]:
        """The queue; read only."""
        if self._left:
            self._line = [item for item in self._line if item not in self._left]
            self._left.clear()
        return self._line

    def append(self, item: RequestState) -> None:
        insort(self.requests, item, key=lambda other: other.priority)
        self.by_id.setdefault(item.req_id, []).append(item)
        if item.gates:
            self._gated[item] = None

    def put_first(self, item: RequestState) -> None:
        """Add a request that has run before, ahead of all others of its priority."""
        insort_left(self.requests, item, key=lambda other: other.priority)
        self.by_id.setdefault(item.req_id, []).append(item)

    def remove(self, item: RequestState) -> None:
        self._left.add(item)
        self._forget(item)
        self._with_reason.pop(item, None)

    def _forget(self, item: RequestState) -> None:
        self._gated.pop(item, None)
        same_id = self.by_id[item.req_id]
        same_id.remove(item)
        if not same_id:
            del self.by_id[item.req_id]

    def admit(
        self,
        running: Collection[RequestState],
        admission: Admission,
        is_long: Callable[[RequestState], bool] = lambda _: False,
        *,
        are_new_paused: bool = False,
    ) -> Iterator[tuple[RequestState, ActivationBudgetError | None]]:
        """Remove and yield requests that start now and, with the error, requests that never can.

        Every request that stays has its reason in `waits_for`.

        Args:
            running: the running requests; the caller adds each started request before it continues.
            admission: decides what fits.
            is_long: whether all steps of a request run in slices, so that it shares no step.
            are_new_paused: whether only requests that have run before may start.
        """
        for item in self._with_reason:
            item.waits_for = "order"
        for item in self._gated:
            for gate in item.gates:
                gate.prepare(item)
        is_long = cache(is_long)  # called for all running requests, once per waiting request
        stay: dict[RequestState, None] = {}
        self._with_reason = stay
        # Earlier requests that do not fit now. The first was overtaken most often.
        skipped: list[RequestState] = []
        while len(stay) < len(self.requests) and len(skipped) < MAX_PASSED:
            if skipped and skipped[0].num_overtaken >= MAX_OVERTAKEN:
                return
            item, error = self.requests[len(stay)], None
            if are_new_paused and not item.started:
                stay[item] = None
                continue
            reasons = (gate.waits_for(item) for gate in item.gates)
            reason: WaitsFor | None = next(filter(None, reasons), None)
            if reason is None:
                error = _refusal(item, admission)
                if error is None:
                    reason = self._obstacle(item, running, admission, is_long)
                if reason is not None:
                    skipped.append(item)
            if reason is not None:
                item.waits_for = reason
                stay[item] = None
                continue
            del self.requests[len(stay)]
            self._forget(item)
            if error is None:
                for earlier in skipped:
                    earlier.num_overtaken += 1
            yield item, error

    def _obstacle(
        self,
        item: RequestState,
        running: Collection[RequestState],
        admission: Admission,
        is_long: Callable[[RequestState], bool],
    ) -> WaitsFor | None:
        """Return what keeps a request from starting; None if nothing does.

        If nothing does, the request's gates have reserved what it needs.
        """
        if running:
            if item.params.force_single_batch or any(r.params.force_single_batch for r in running):
                return "others"
            if len(running) >= self._max_running:
                return "requests"
            long = {other.demand for other in (*running, item) if is_long(other)}
            obstacle = admission.obstacle([r.demand for r in running], item.demand, long=long)
            if obstacle is not None:
                return obstacle
        return next((gate.lacks for gate in item.gates if not gate.reserve(item)), None)


def _refusal(item: RequestState, admission: Admission) -> ActivationBudgetError | None:
    """Return the error if a request would not fit even alone; else place its cached layers."""
    try:
        item.demand = admission.check(item.demand)
    except ActivationBudgetError as error:
        return error
    return None

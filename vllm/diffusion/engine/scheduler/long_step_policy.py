# SPDX-License-Identifier: Apache-2.0
"""Shares the device between long and short requests: decides whose steps run in slices, and when.

A request is long while its next step takes longer than the longest allowed pause of other requests,
or uses fp8 attention, whose scales belong to one request. Its step is computed slice by slice, each
half a pause long. The device receives the next slice when the previous one begins, so a new request
waits for two slices at most. While short requests run, a slice is due only when long requests have
had less than their share of the time.

Workers follow only these decisions, so that all ranks do the same. They report the times of slices,
from which the policy learns the ratio to the predictions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vllm.diffusion.engine.long_steps import LongSteps, PausedStep, StepSlice
from vllm.diffusion.engine.scheduler.turns import take_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from vllm.diffusion.config import Settings
    from vllm.diffusion.engine.long_steps import LongStepReport
    from vllm.diffusion.engine.scheduler.request_state import RequestState
    from vllm.diffusion.memory import Admission


class SpeedEstimate:
    """Ratio of measured seconds of the device to the planner's predicted seconds.

    It is the median over the last slices, weighted by their work. A slice may wait until a kernel
    is compiled, and such an outlier must not make later plans cut steps into small chunks.

    Args:
        prior_s: weight of the prior ratio, 1, in predicted seconds.

    Attributes:
        factor: the ratio, rounded to two digits so that cached plans can be reused.
    """

    MAX_REPORTS = 64  # maximum number of recorded slices

    def __init__(self, prior_s: float) -> None:
        # Pairs (ratio, predicted seconds).
        self._seen = deque([(1.0, prior_s)], maxlen=self.MAX_REPORTS)
        self.factor = 1.0

    def learn(self, predicted_s: float, taken_s: float) -> None:
        if not predicted_s:  # the plan predicts no time
            return
        self._seen.append((taken_s / predicted_s, predicted_s))
        ratios, weights = zip(*sorted(self._seen), strict=True)
        sums = list(accumulate(weights))
        self.factor = float(f"{ratios[bisect_left(sums, sums[-1] / 2)]:.1e}")


class LongStepPolicy:
    """Decides which requests are long, and chooses the next slice.

    Args:
        settings: share of the time of long requests, and longest pause of short requests.

    Attributes:
        longest_pause_s: seconds that a short request may wait without progress.
        speed: speed of the device.
        is_idle: whether no running request may be long and no slice is in flight, so that steps
            need no sharing.
    """

    def __init__(self, settings: Settings) -> None:
        self._share, self.longest_pause_s = settings.long_share, settings.longest_pause_s
        self.speed = SpeedEstimate(self.longest_pause_s)
        self.is_idle = True
        self._paused: PausedStep | None = None
        self._is_shared = False  # whether requests of both kinds take part in the current step
        # Seconds by which long requests have had less than their share.
        self._owed_s = 0.0
        self._predicted_s: WeakKeyDictionary[RequestState, dict[int, float]] = WeakKeyDictionary()

    @property
    def slice_s(self) -> float:
        """Seconds of one slice."""
        return self.longest_pause_s / 2

    def started(self, item: RequestState, admission: Admission) -> None:
        """Handle the start of a request, also on a longer canvas."""
        self._predicted_s.pop(item, None)
        if self.is_long(item, math.inf, admission):
            self.is_idle = False

    def learn(
        self,
        report: LongStepReport | None,
        passed_s: float,
        running: Iterable[RequestState],
        admission: Admission | None,
    ) -> None:
        """Update the policy from the workers' reports of slices.

        May be skipped while no slices are reported and `is_idle`.

        Args:
            report: what a worker reports with the results of a step; None for nothing.
            passed_s: seconds since the previous results.
            running: the running requests.
            admission: decides what fits; None while the size of the memory is unknown.
        """
        self._paused = None if report is None else report.paused
        if self._is_shared:
            self._owed_s = min(self._owed_s + self._share * passed_s, self.slice_s)
        if report is not None and report.num_slices:
            self.speed.learn(report.seconds, report.taken_s)
            self._owed_s += report.num_slices * self.slice_s - report.taken_s
        # Long requests have had at least the slices that a new request waits for.
        if not self._is_shared:
            self._owed_s = max(self._owed_s, -self.longest_pause_s)
        has_slices = self._is_shared or self._paused is not None
        self.is_idle = not has_slices and not (
            admission is not None
            and any(self.is_long(item, math.inf, admission) for item in running)
        )

    # ---- which requests are long ----

    def is_long(self, item: RequestState, rows: float, admission: Admission) -> bool:
        """Whether a step of at most `rows` rows of this request must not be shared with others.

        It takes longer than the longest pause, or uses fp8 attention.
        """
        max_rows = item.demand.largest_rows(admission.row_budget)
        if item.demand.fp8_attention and rows >= item.demand.length * item.demand.num_sequences:
            return True
        predicted = self._predicted_s.setdefault(item, {})
        for count in (max_rows, int(min(rows, max_rows))):
            if count not in predicted:
                predicted[count] = admission.seconds_of(item.demand, count)
            if predicted[count] <= self.longest_pause_s / self.speed.factor:
                return False
        return True

    def long(self, running: Mapping[str, RequestState], admission: Admission) -> list[str]:
        """Return the long requests in the order of their turns, and any request with a begun step.

        Args:
            running: running requests, in the order of their turns.
            admission: decides what fits, and predicts times.
        """
        paused = None if self._paused is None else self._paused.req_id
        return [
            req_id
            for req_id, item in running.items()
            if req_id == paused or self.is_long(item, item.next_rows, admission)
        ]

    # ---- whose turn it is ----

    def divide(
        self,
        running: Mapping[str, RequestState],
        launched: AbstractSet[str],
        admission: Admission,
        next_step: Callable[[Mapping[str, RequestState]], dict[str, int]],
        *,
        is_paused: bool,
    ) -> tuple[dict[str, int], LongSteps]:
        """Divide the next step among the running requests; may be skipped while `is_idle`.

        Args:
            running: running requests, in the order of their turns.
            launched: requests of the steps in flight; long requests among them stay whole.
            admission: decides what fits, and predicts times.
            next_step: chooses which of the given requests take part in a step as a whole.
            is_paused: whether only launched steps continue.

        Returns:
            the rows of the next step, by request, and the decisions about long requests.
        """
        long = self.long(running, admission)
        if is_paused:
            return next_step(running), LongSteps(tuple(long))
        cut = {req_id: running[req_id] for req_id in long if req_id not in launched}
        rows = next_step({req_id: item for req_id, item in running.items() if req_id not in cut})
        if launched.isdisjoint(rows) and not self._fits_beside(rows, running, admission):
            rows = {}
        ready = [item for item in cut.values() if item.has_pages]
        next_slice = self.next_slice(ready, admission, is_shared=bool(rows))
        if next_slice is not None:
            rows[next_slice.req_id] = next_slice.rows
        return rows, LongSteps(tuple(long), next_slice)

    def next_slice(
        self, long: Sequence[RequestState], admission: Admission, *, is_shared: bool
    ) -> StepSlice | None:
        """Return the next slice of the step that has begun, else the first slice of the next step.

        Args:
            long: requests that may get a slice, in the order of their turns.
            admission: decides what fits, and predicts times.
            is_shared: whether short requests take part in the same step.
        """
        self._is_shared = is_shared and bool(long)
        if not long or (is_shared and self._owed_s < 0):
            return None
        paused = None if self._paused is None else self._paused.req_id
        item = next((item for item in long if item.req_id == paused), long[0])
        units = {item.req_id: item.demand.unit} if item.demand.unit else {}
        rows = take_turns({item.req_id: item.next_rows}, admission.row_budget, units)
        self._owed_s -= self.slice_s  # corrected when the measured time is reported
        return StepSlice(item.req_id, rows[item.req_id], self.slice_s / self.speed.factor)

    def _fits_beside(
        self, rows: Mapping[str, int], running: Mapping[str, RequestState], admission: Admission
    ) -> bool:
        """Whether a step of these requests fits into the memory that a paused step leaves."""
        if self._paused is None or not rows:
            return True
        demands = [running[req_id].demand for req_id in rows]
        kept_bytes = admission.kept_bytes(item.demand for item in running.values())
        kept_bytes += self._paused.held_bytes
        return admission.fits(admission.step_of(demands), kept_bytes)

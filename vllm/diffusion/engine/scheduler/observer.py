# SPDX-License-Identifier: Apache-2.0
"""Records metrics of steps and requests for the server, if statistics are enabled."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vllm.diffusion import metrics
from vllm.diffusion.engine.scheduler.request_state import seconds_since_arrival
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from vllm.diffusion.adapters.known_adapters import AdapterReport
    from vllm.diffusion.engine.messages import (
        DiffusionRunnerOutput,
        DiffusionSchedulerOutput,
        StepResult,
    )
    from vllm.diffusion.engine.scheduler.request_state import RequestState
    from vllm.v1.request import Request

STATISTICS_S = 0.1  # minimum seconds between two messages that carry only statistics
ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class Observer:
    """Records events, and returns them as upstream's statistics."""

    def __init__(self) -> None:
        self._seen = metrics.Observations()
        self._last_report = 0.0  # time.monotonic() of the latest results
        self._last_statistics = 0.0  # the same clock: last time that statistics were sent
        # The same clock: last time that waiting requests were sent; 0 if there were none.
        self._last_waiting = 0.0
        self.peak_bytes = 0  # peak of all steps

    # ---- requests ----

    def arrived(self, request: Request) -> None:
        request.record_event(EngineCoreEventType.QUEUED)

    def refused(self, reason: str) -> None:
        """Record that a request ends with an error; `reason` is the metric's label."""
        self._seen.count(metrics.REQUESTS_REFUSED, label=reason)

    def timed_out(self) -> None:
        self._seen.count(metrics.REQUESTS_TIMED_OUT)

    def started(self, request: Request) -> None:
        self._seen.observe(metrics.QUEUE_TIME, seconds_since_arrival(request))
        request.record_event(EngineCoreEventType.SCHEDULED)

    def progressed(self, item: RequestState, result: StepResult) -> None:
        """Record a step's result of `item`; must be called before `item.advance`."""
        self._seen.count(metrics.FORWARDS, result.num_forwards - item.num_forwards)
        self._seen.count(metrics.REQUEST_STEPS, result.num_steps - item.num_steps)
        self._seen.count(metrics.DRAFT_STATES, result.num_drafts - item.num_drafts)
        accepted = result.num_steps - result.num_forwards - item.num_accepted
        self._seen.count(metrics.ACCEPTED_STATES, accepted)
        self._seen.count(metrics.COMMITTED_TOKENS, result.num_committed - item.num_committed)
        if result.num_committed and not item.num_committed:
            waited = seconds_since_arrival(item.request)
            self._seen.observe(metrics.TIME_TO_FIRST_COMMIT, waited)

    def ended(self, item: RequestState) -> None:
        """Record that a request has stopped running, for any reason."""
        if not item.num_forwards:
            return
        self._seen.observe(metrics.TOKENS_PER_FORWARD, item.num_committed / item.num_forwards)
        if item.num_drafts:
            self._seen.observe(metrics.STEPS_PER_FORWARD, item.num_steps / item.num_forwards)
        if item.request.status in ANSWERED:
            self._seen.count(metrics.FORWARDS_SAVED, item.num_forwards_saved)

    # ---- steps ----

    def stepped(self, step: DiffusionSchedulerOutput, done: DiffusionRunnerOutput) -> None:
        if done.usage is not None:
            self.peak_bytes = max(self.peak_bytes, done.usage.peak_bytes)
            self._seen.observe(metrics.POOL_BUDGET, done.usage.budget_bytes)
            self._seen.observe(metrics.POOL_IN_USE, done.usage.in_use_bytes)
            self._seen.observe(metrics.HOST_IN_USE, done.usage.host_bytes)
            self._seen.observe(metrics.POOL_PEAK, self.peak_bytes)
        if done.adapter_report is not None:
            self._note_adapters(done.adapter_report)
        if not done.results:
            return
        if done.usage is not None:
            self._seen.observe(metrics.PLANNER_TIME, done.usage.planner_us / 1e6)
        now = time.monotonic()
        self._seen.count(metrics.DENOISE_STEPS)
        self._seen.observe(metrics.STEP_BATCH_SIZE, len(done.results))
        self._seen.observe(metrics.STEP_ROWS, done.num_rows)
        # A step may be scheduled before the results of the previous step are known.
        self._seen.observe(metrics.STEP_TIME, now - max(step.scheduled_at, self._last_report))
        self._last_report = now

    def _note_adapters(self, report: AdapterReport) -> None:
        self._seen.observe(metrics.ADAPTERS_KNOWN, report.num_known)
        self._seen.observe(metrics.ADAPTERS_PLACED, report.num_placed)
        self._seen.observe(metrics.ADAPTER_SLOT_BYTES, report.slot_bytes)
        self._seen.count(metrics.ADAPTER_PLACEMENTS, report.num_placements)
        self._seen.count(metrics.ADAPTER_EVICTIONS, report.num_evictions)
        self._seen.count(metrics.ADAPTER_STEPS, report.num_steps)
        for source, count in report.loads.items():
            self._seen.count(metrics.ADAPTER_LOADS, count, label=source)
        for seconds in report.load_seconds:
            self._seen.observe(metrics.ADAPTER_LOAD_TIME, seconds)

    # ---- statistics ----

    def are_statistics_due(self) -> bool:
        """Whether to send statistics without an output.

        Such a message costs the server as much time as a small step.
        """
        return time.monotonic() - self._last_statistics >= STATISTICS_S

    def statistics(self, num_running: int, waiting: Collection[RequestState]) -> SchedulerStats:
        """Return everything recorded since the last call.

        Args:
            num_running: number of running requests.
            waiting: the waiting requests, in order.
        """
        self._last_statistics = now = time.monotonic()
        stats = SchedulerStats(num_running_reqs=num_running, num_waiting_reqs=len(waiting))
        is_due = now - self._last_waiting >= STATISTICS_S if waiting else self._last_waiting > 0
        if is_due:
            self._seen.wait_for({item.req_id: item.waits_for for item in waiting})
            self._last_waiting = now if waiting else 0.0
        self._seen.put_into(stats)
        return stats

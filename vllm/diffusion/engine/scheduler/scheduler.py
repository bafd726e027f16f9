# SPDX-License-Identifier: Apache-2.0
"""Step-level continuous batching: an engine step is one denoising step of the running requests.

Requests wait until they fit together with the running requests (`waiting.py`). Then they take part
in every step, or take turns if their rows do not all fit into one step (`turns.py`). The worker
owns the canvas; the scheduler receives only tokens that became final. It learns the size of the
memory from the worker's first answer, so the very first step is empty.

Capabilities that only some requests need are guests: gates, which are called only for requests that
they accepted (`AdmissionGate`), and the sharing of steps with long requests
(`long_step_policy.py`).
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from vllm.diffusion.config import row_budget, served_model, settings_of
from vllm.diffusion.core.errors import ActivationBudgetError, InvalidParameterError
from vllm.diffusion.engine.long_steps import NO_LONG_STEPS
from vllm.diffusion.engine.messages import (
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    NewCanvas,
    StepResult,
    StepUsage,
)
from vllm.diffusion.engine.planning import make_planner
from vllm.diffusion.engine.scheduler import outputs, trainer_calls
from vllm.diffusion.engine.scheduler.likelihood_calls import LikelihoodCalls
from vllm.diffusion.engine.scheduler.long_step_policy import LongStepPolicy
from vllm.diffusion.engine.scheduler.observer import Observer
from vllm.diffusion.engine.scheduler.paging import Paging
from vllm.diffusion.engine.scheduler.prompt_groups import PromptGroups
from vllm.diffusion.engine.scheduler.request_state import RequestState
from vllm.diffusion.engine.scheduler.turns import by_priority, move_to_end, take_turns
from vllm.diffusion.engine.scheduler.upstream_interface import CanvasSchedulerInterface
from vllm.diffusion.engine.scheduler.waiting import WaitingLine
from vllm.diffusion.memory import Admission
from vllm.diffusion.process import log_filter, watchdog
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.config import VllmConfig
    from vllm.diffusion.engine.long_steps import LongSteps
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

logger = init_logger(__name__)


class DiffusionScheduler(CanvasSchedulerInterface):
    """Decides which requests start and which take part in a step, and reports to their clients.

    Attributes:
        last_usage: memory of the last step; None before the first.
        paging: pages of exact caches; None for families without them.
        long_steps: sharing of steps with long requests; None if steps are never cut.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        hash_block_size: int,
        mm_registry: Any = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        log_filter.drop_irrelevant_lines()
        watchdog.follow_parent()  # a forked process has not run the plugin
        self._model = served_model(vllm_config)
        self._vllm_config = vllm_config
        self._row_budget = row_budget(vllm_config)
        # None until the worker has reported the size of the memory.
        self._admission: Admission | None = None
        self.last_usage: StepUsage | None = None
        self._waiting = WaitingLine(vllm_config.scheduler_config.max_num_seqs)
        self._running: dict[str, RequestState] = {}  # in the order of their turns
        self._launched: list[list[str]] = []  # requests of each step in flight
        self._outbox = outputs.Outbox(lists_finished=include_finished_set)
        # No request times out before this time.monotonic().
        self._next_deadline = math.inf
        self._heard_at = 0.0  # time.monotonic() of the latest results
        self._finished_req_ids: set[str] = set()
        self._epoch = 0  # number of times that workers have dropped cached results
        # Labels of weights, by the number of weight changes before them.
        self.labels = {0: trainer_calls.DEFAULT}
        trainer_calls.patch_engine_core()
        # Guests.
        self._observer = Observer() if log_stats else None
        settings = settings_of(vllm_config)
        logger.info("long requests: %s", settings.sharing)
        self.long_steps = LongStepPolicy(settings) if settings.longest_pause_ms else None
        self.paging: Paging | None = None
        if kv_cache_config.kv_cache_groups:
            self.paging = Paging(vllm_config, kv_cache_config, hash_block_size, log_stats=log_stats)
        self._paged_bytes = 0 if self.paging is None else self.paging.num_bytes
        others = (PromptGroups(), LikelihoodCalls())
        self._gates = others if self.paging is None else (self.paging, *others)

    # ---- arrival and end of requests ----

    def add_request(self, request: Request) -> None:
        """Queue a request with its decided parameters; a failure ends it with an error."""
        if self._observer is not None:
            self._observer.arrived(request)
        try:
            item = RequestState.of(request, self._model)
            item.gates = tuple(gate for gate in self._gates if gate.arrived(item))
        except ActivationBudgetError as error:
            self._refuse(request, str(error), reason="memory")
        except InvalidParameterError as error:
            self._refuse(request, str(error), reason="engine")
        else:
            self._next_deadline = min(self._next_deadline, item.deadline)
            self._waiting.append(item)

    def _refuse(self, request: Request, message: str, reason: str, failed: bool = False) -> None:
        """End a request with an error, which its client receives with the next step's results."""
        logger.warning("request %s refused: %s", request.request_id, message)
        if self._observer is not None:
            self._observer.refused(reason)
        self._end(request, RequestStatus.FINISHED_ERROR)
        self._outbox.put(request, outputs.refusal(request, message, failed))

    def _end_late_requests(self) -> None:
        """End requests that timed out; their clients are informed with the next results."""
        now = time.monotonic()
        if now < self._next_deadline:
            return
        items = [*self._running.values(), *self._waiting.requests]
        self._next_deadline = min((r.deadline for r in items if r.deadline > now), default=math.inf)
        for item in items:
            if item.deadline > now:
                continue
            where = "running" if item.started else "queued"
            message = f"timeout: not complete {item.params.timeout_s:g} s after arrival ({where})"
            logger.info("request %s: %s", item.req_id, message)
            if self._observer is not None:
                self._observer.timed_out()
            self.finish_requests(item.req_id, RequestStatus.FINISHED_ABORTED)
            self._outbox.put(item.request, outputs.timeout(item, message))

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if request_ids is None:
            items = [*self._running.values(), *self._waiting.requests]
        else:
            req_ids = {request_ids: None} if isinstance(request_ids, str) else {*request_ids}
            items = [self._running[req_id] for req_id in req_ids if req_id in self._running]
            items += [item for req_id in req_ids for item in self._waiting.by_id.get(req_id, ())]
        for item in items:
            if item.req_id not in self._running:
                self._waiting.remove(item)
                self._leave(item)
            self._end(item.request, finished_status)
        return [item.request for item in items]

    def _end(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        item = self._running.pop(request.request_id, None)
        if item is not None:
            self._leave(item)
        self._outbox.note_end(request)

    def _leave(self, item: RequestState) -> None:
        """Report the end of a request to its gates and, if it has started, to the workers."""
        item.leave()
        if item.started:
            self._finished_req_ids.add(item.req_id)
            if self._observer is not None:
                self._observer.ended(item)

    # ---- one step ----

    def schedule(self, throttle_prefills: bool = False) -> DiffusionSchedulerOutput:
        """Start waiting requests, and choose the requests of the next step."""
        self._end_late_requests()
        launched = set().union(*self._launched)
        if self.paging is not None:
            self.paging.provide(self._running.values(), launched)
        is_paused = self._pause_state == PauseState.PAUSED_ALL
        admitted = self._start_waiting() if self._waiting.by_id and not is_paused else []
        rows, long_steps = self._divide(launched)
        finished, self._finished_req_ids = self._finished_req_ids, set()
        return DiffusionSchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens=rows,
            total_num_scheduled_tokens=sum(rows.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            admitted=admitted,
            new_pages={} if self.paging is None else self.paging.take_new_pages(),
            scheduled_at=time.monotonic(),
            long_steps=long_steps,
            should_drain=self._pause_state == PauseState.PAUSED_ALL,
            epoch=self._epoch,
        )

    def _start_waiting(self) -> list[NewCanvas]:
        """Start the waiting requests that fit; return the messages for the workers."""
        admission, policy = self._admission, self.long_steps
        if admission is None:
            return []

        def is_long(item: RequestState) -> bool:
            return policy is not None and policy.is_long(item, item.demand.steady_rows, admission)

        admitted = []
        are_new_paused, running = self._pause_state == PauseState.PAUSED_NEW, self._running.values()
        for item, error in self._waiting.admit(
            running, admission, is_long, are_new_paused=are_new_paused
        ):
            if error is not None:
                self._leave(item)
                if item.started:  # the answer ends with its present canvas
                    self._end(item.request, RequestStatus.FINISHED_LENGTH_CAPPED)
                    self._outbox.put(item.request, outputs.end(item))
                else:
                    self._refuse(item.request, str(error), reason="memory")
                continue
            self._running[item.req_id] = item
            item.labels = self.labels
            if self._observer is not None and not item.started:
                self._observer.started(item.request)
            admitted.append(item.start())
            if policy is not None:
                policy.started(item, admission)
        return admitted

    def _divide(self, launched: set[str]) -> tuple[dict[str, int], LongSteps]:
        """Divide the next step among the running requests; `launched` are in flight.

        Returns:
            the rows of each request that takes part; the decisions about long requests.
        """
        turns = by_priority(self._running, lambda item: item.priority)
        is_paused = self._pause_state == PauseState.PAUSED_ALL
        next_step = self._launched_step if is_paused else self._next_step
        admission, policy = self._admission, self.long_steps
        if admission is None or policy is None or policy.is_idle:
            return next_step(turns), NO_LONG_STEPS
        return policy.divide(turns, launched, admission, next_step, is_paused=is_paused)

    def _next_step(self, turns: Mapping[str, RequestState]) -> dict[str, int]:
        """Return the rows of the requests in `turns` that take part in the next step as a whole.

        These are the requests of the first step in flight if there is one, else the requests whose
        turn it is.
        """
        launched = self._launched_step(turns)
        if launched:
            return launched
        return take_turns(
            {req_id: item.next_rows for req_id, item in turns.items() if item.has_pages},
            self._row_budget,
            {req_id: item.demand.unit for req_id, item in turns.items() if item.demand.unit},
        )

    def _launched_step(self, turns: Mapping[str, RequestState]) -> dict[str, int]:
        """Return the rows of the first step in flight that has requests of `turns`, if any."""
        for req_ids in self._launched:
            launched = {req_id: turns[req_id].next_rows for req_id in req_ids if req_id in turns}
            if launched:
                return launched
        return {}

    def update_from_output(
        self, scheduler_output: DiffusionSchedulerOutput, model_runner_output: DiffusionRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Update all requests with the results of a step, and return the messages to clients."""
        done = model_runner_output
        if self._observer is not None:
            self._observer.stepped(scheduler_output, done)
        self._learn(done)
        self._launched = done.launched
        if done.epoch != self._epoch:
            self._invalidate(done)
        for req_id, result in done.results.items():
            item = self._running.get(req_id)
            if item is not None:  # otherwise it was aborted while the step ran
                self._outbox.put(item.request, *self._advance(item, result, done.usage))
        move_to_end(self._running, done.results)
        has_news = not self._outbox.is_empty or not (self._running or self._waiting.by_id)
        return self._outbox.take(self.make_stats(only_if_due=not has_news))

    def _learn(self, done: DiffusionRunnerOutput) -> None:
        """Update the memory budget and the speed estimate of long steps from a worker's report."""
        now = time.monotonic()
        passed_s, self._heard_at = now - self._heard_at, now
        usage, policy = done.usage, self.long_steps
        if usage is not None:
            self.last_usage = usage
            budget_bytes = usage.budget_bytes - self._paged_bytes
            if self._admission is None or self._admission.budget_bytes != budget_bytes:
                planner = make_planner(self._vllm_config, budget_bytes, usage.rates)
                self._admission = Admission(planner)
        if policy is not None and (done.long_steps is not None or not policy.is_idle):
            policy.learn(done.long_steps, passed_s, self._running.values(), self._admission)

    def _invalidate(self, done: DiffusionRunnerOutput) -> None:
        """Invalidate all cached results, after a weight update or a release of their memory."""
        self._epoch = done.epoch
        items = [*self._running.values(), *self._waiting.requests]
        for gate in self._gates:
            gate.results_dropped(items, done.epoch)
        for req_id, rows in done.invalidated.items():
            item = self._running.get(req_id)
            if item is not None and not item.is_paged:
                item.next_rows = rows

    def _advance(
        self, item: RequestState, result: StepResult, usage: StepUsage | None
    ) -> list[EngineCoreOutput]:
        """Update a request with its result and return the outputs for its client."""
        request = item.request
        if result.error is not None:
            self._refuse(request, result.error, reason="engine", failed=True)
            return []
        if self._observer is not None:
            self._observer.progressed(item, result)
        new_token_ids = item.advance(result, usage)
        if request.is_finished():
            self._end(request, request.status)
        elif result.new_lengths:
            del self._running[item.req_id]
            item.grow(result.new_lengths)
            self._waiting.put_first(item)
        elif not new_token_ids and result.canvas is None:
            return []
        return outputs.progress(item, new_token_ids, result)

    # ---- state that upstream requests ----

    def get_grammar_bitmask(self, scheduler_output: Any) -> None:
        """Return no bitmask: upstream asks in every step, but workers handle languages."""

    def make_stats(self, *, only_if_due: bool = False) -> SchedulerStats | None:
        observer = self._observer
        if observer is None or (only_if_due and not observer.are_statistics_due()):
            return None
        stats = observer.statistics(len(self._running), self._waiting.requests)
        if self.paging is not None:
            self.paging.put_into(stats)
        return stats

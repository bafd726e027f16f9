# SPDX-License-Identifier: Apache-2.0
"""Step-level continuous batching: an engine step is one denoise step of the running requests.

Requests wait in line until their steps fit beside those that run (`admission.py`), and then take
part in every step, or take turns where not all their rows fit into one (`turns.py`). The worker
owns the canvas; the scheduler sees only the tokens that became final. It learns the size of the
memory from the worker's first answer, so the very first step is empty.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.diffusion.config import row_budget, served_model, settings_of
from vllm.diffusion.core.errors import ActivationBudgetError, InvalidParameterError
from vllm.diffusion.engine.messages import (
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    NewCanvas,
    StepResult,
    StepUsage,
)
from vllm.diffusion.engine.planning import demand_of, make_planner
from vllm.diffusion.engine.scheduler import outputs
from vllm.diffusion.engine.scheduler.long_requests import Slicing
from vllm.diffusion.engine.scheduler.observer import Observer, seconds_since_arrival
from vllm.diffusion.engine.scheduler.paging import Paging
from vllm.diffusion.engine.scheduler.prompt_groups import PromptGroups
from vllm.diffusion.engine.scheduler.request_state import RequestState
from vllm.diffusion.engine.scheduler.turns import by_priority, take_turns, to_the_end
from vllm.diffusion.engine.scheduler.waiting import Gathering, WaitingLine
from vllm.diffusion.process import log_filter as startup_log
from vllm.diffusion.process import watchdog
from vllm.diffusion.request.decision import decision_of
from vllm.diffusion.request.params import DRAWN_SEED_BITS
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vllm.config import VllmConfig
    from vllm.diffusion.engine.scheduler.request_state import WaitsFor
    from vllm.diffusion.memory import Planner
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

logger = init_logger(__name__)


class DiffusionScheduler(SchedulerInterface):
    """Decides which requests start and which take part in a step, and reports to their clients."""

    connector = None
    ec_connector = None
    _pause_state = PauseState.UNPAUSED

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
        startup_log.leave_out_what_does_not_apply()
        watchdog.follow_parent()  # a forked process has not passed the plugin
        self._model = served_model(vllm_config)
        self._vllm_config = vllm_config
        self._row_budget = row_budget(vllm_config)
        self._planner: Planner | None = None  # until the worker has said what memory there is
        self.last_usage: StepUsage | None = None
        self._paging = Paging(vllm_config, kv_cache_config, hash_block_size, log_stats=log_stats)
        self._waiting = WaitingLine(vllm_config.scheduler_config.max_num_seqs)
        self._running: dict[str, RequestState] = {}  # in the order of their turns
        self._untold: list[tuple[int, EngineCoreOutput]] = []  # clients, and that a request ended
        self._siblings = PromptGroups()
        self._gathering = Gathering()
        self._launched: list[list[str]] = []  # requests of each step that is under way already
        settings = settings_of(vllm_config)
        logger.info("long requests: %s", settings.sharing)
        self.slicing = Slicing(settings)
        self._observer = Observer(enabled=log_stats)
        self._finished_req_ids: set[str] = set()
        self._tells_finished = include_finished_set
        self._finished_by_client: dict[int, set[str]] = defaultdict(set)

    # ---- requests come and go ----

    def add_request(self, request: Request) -> None:
        """Queue a request, with the decision that it brings; a failure ends it with an error."""
        self._observer.arrived(request)
        request.prefill_stats.set(request.num_prompt_tokens, 0, 0)
        try:
            prompt = request.prompt_token_ids or []
            decided = decision_of(request.sampling_params, self._model, prompt)
        except InvalidParameterError as error:
            self._refuse(request, str(error), reason="engine")
            return
        if decided.seed is None:
            decided = decided.with_seed(secrets.randbits(DRAWN_SEED_BITS))
        if decided.priority is None:
            decided = replace(decided, priority=request.priority)
        demand = demand_of(decided, request.num_prompt_tokens)
        item = RequestState(request, decided, demand)
        if decided.timeout_s is not None:
            left_s = decided.timeout_s - seconds_since_arrival(request)
            item.deadline = time.monotonic() + left_s
        try:
            if item.is_paged:
                self._paging.arrived(item)
        except ActivationBudgetError as error:
            self._refuse(request, str(error), reason="memory")
            return
        self._siblings.arrived(item)
        self._gathering.arrived(item)
        self._waiting.append(item)

    def _refuse(self, request: Request, message: str, reason: str) -> None:
        """End a request with an error, which its client gets with the results of the next step."""
        self._observer.refused(request, message, reason)
        self._end(request, RequestStatus.FINISHED_ERROR)
        self._untold.append((request.client_index, outputs.refusal(request, message)))

    def _end_what_is_late(self) -> None:
        """End requests whose time is over; their clients hear of it with the next results."""
        now = time.monotonic()
        late = [r for r in (*self._running.values(), *self._waiting) if r.deadline <= now]
        for item in late:
            where = "running" if item.started else "queued"
            message = f"timeout: not complete {item.params.timeout_s:g} s after arrival ({where})"
            self._observer.timed_out(item.request, message)
            self.finish_requests(item.req_id, RequestStatus.FINISHED_ABORTED)
            self._untold.append((item.request.client_index, outputs.timeout(item, message)))

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        items = [*self._running.values(), *self._waiting]
        if request_ids is not None:
            wanted = {request_ids} if isinstance(request_ids, str) else set(request_ids)
            items = [item for item in items if item.req_id in wanted]
        for item in items:
            if item.req_id not in self._running:
                self._waiting.remove(item)
                self._siblings.left(item)
            self._end(item.request, finished_status)
        return [item.request for item in items]

    def _end(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        item = self._running.pop(request.request_id, None)
        if item is not None:
            self._paging.free(item)
            self._siblings.left(item)
            self._finished_req_ids.add(request.request_id)
            self._observer.ended(item)
        if self._tells_finished:
            self._finished_by_client[request.client_index].add(request.request_id)

    # ---- one step ----

    def schedule(self, throttle_prefills: bool = False) -> DiffusionSchedulerOutput:
        self._end_what_is_late()
        launched = set().union(*self._launched)
        self._paging.provide(self._running.values(), launched)
        admitted = self._admit() if self.pause_state == PauseState.UNPAUSED else []
        long = self.slicing.long(by_priority(self._running, _priority), self._planner)
        rows, next_slice = dict[str, int](), None
        if self.pause_state != PauseState.PAUSED_ALL:
            waiting = [self._running[req_id] for req_id in long if req_id not in launched]
            rows = self._next_step({item.req_id for item in waiting})
            ready = [item for item in waiting if item.has_pages]
            next_slice = self.slicing.next_slice(ready, self._planner, is_shared=bool(rows))
        if next_slice is not None:
            rows[next_slice.req_id] = next_slice.rows
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
            new_pages=self._paging.take_new_pages(),
            scheduled_at=time.monotonic(),
            next_slice=next_slice,
            long=long,
        )

    def _admit(self) -> list[NewCanvas]:
        if self._planner is None:
            return []
        planner, admitted = self._planner, []
        for item in self._waiting:
            self._siblings.place(item)

        def is_long(item: RequestState) -> bool:
            return self.slicing.is_long(item, item.demand.steady_rows, planner)

        def waits(item: RequestState) -> WaitsFor | None:
            if self._siblings.waits(item):
                return "prompt"
            return "call" if self._gathering.waits(item) else None

        for item, error in self._waiting.admit(
            self._running.values(), planner, self._paging.admits, is_long, waits
        ):
            if error is not None:
                self._siblings.left(item)
                self._refuse(item.request, str(error), reason="memory")
                continue
            self._running[item.req_id] = item
            self._siblings.start(item)
            admitted.append(item.start())
            self._observer.started(item.request)
        return admitted

    def _next_step(self, sliced: Collection[str]) -> dict[str, int]:
        """Return the requests of the next step, with their rows, without those in slices."""
        running = by_priority(self._running, _priority)
        short = {req_id: item for req_id, item in running.items() if req_id not in sliced}
        for req_ids in self._launched:
            launched = {req_id: short[req_id].next_rows for req_id in req_ids if req_id in short}
            if launched:
                return launched
        taken = take_turns(
            {req_id: item.next_rows for req_id, item in short.items() if item.has_pages},
            self._row_budget,
            {req_id: item.demand.unit for req_id, item in short.items() if item.demand.unit},
        )
        return taken if self.slicing.fits_beside(taken, self._running, self._planner) else {}

    def update_from_output(
        self, scheduler_output: DiffusionSchedulerOutput, model_runner_output: DiffusionRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        done = model_runner_output
        self._observer.stepped(scheduler_output, done)
        self._learn(done.usage)
        self._launched = done.launched
        self.slicing.learn(done)
        told: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        for client, output in self._untold:
            told[client].append(output)
        self._untold = []
        for req_id, result in done.results.items():
            item = self._running.get(req_id)
            if item is None:
                continue  # aborted while the step ran
            news = self._advance(item, result, done.usage)
            if news:
                told[item.request.client_index] += news
        to_the_end(self._running, done.results)
        finished, self._finished_by_client = self._finished_by_client, defaultdict(set)
        stats = self._statistics_if_due(has_outputs=bool(told or finished))
        return outputs.envelopes(told, finished, stats)

    def _learn(self, usage: StepUsage | None) -> None:
        """Take in the size of the memory, and what the step took of it."""
        if usage is None:
            return
        self.last_usage = usage
        budget_bytes = usage.budget_bytes - self._paging.num_bytes
        if self._planner is None or self._planner.budget_bytes != budget_bytes:
            self._planner = make_planner(self._vllm_config, budget_bytes, usage.rates)

    def _advance(
        self, item: RequestState, result: StepResult, usage: StepUsage | None
    ) -> list[EngineCoreOutput]:
        """Take in a request's result and return the outputs for its client."""
        request = item.request
        if result.error is not None:
            self._observer.refused(request, result.error, reason="engine")
            self._end(request, RequestStatus.FINISHED_ERROR)
            return [outputs.refusal(request, result.error)]
        self._observer.progressed(item, result)
        item.take_part(result, usage)
        new_token_ids = item.accept(result)
        self._paging.publish(item)
        if request.is_finished():
            self._end(request, request.status)
        elif not new_token_ids and result.canvas is None:
            return []
        return outputs.progress(item, new_token_ids, result)

    def _statistics_if_due(self, has_outputs: bool) -> SchedulerStats | None:
        is_idle = self.get_num_unfinished_requests() == 0
        is_due = has_outputs or is_idle or self._observer.are_statistics_due()
        return self.make_stats() if is_due else None

    # ---- state that upstream asks for ----

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state

    def shutdown(self) -> None:
        pass

    def get_num_unfinished_requests(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._untold)

    def has_finished_requests(self) -> bool:
        return bool(self._finished_req_ids)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._running), len(self._waiting)

    def make_stats(self) -> SchedulerStats | None:
        stats = self._observer.statistics(len(self._running), list(self._waiting))
        if stats is not None:
            self._paging.put_into(stats)
        return stats

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return self._paging.reset(self._running.values() if reset_running_requests else ())

    # ---- what upstream's interface has and canvases do not: drafts, grammars, encoder caches ----

    def get_grammar_bitmask(self, scheduler_output: Any) -> None:
        return None

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        pass

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        pass

    def reset_encoder_cache(self) -> None:
        pass


def _priority(item: RequestState) -> int:
    return item.priority

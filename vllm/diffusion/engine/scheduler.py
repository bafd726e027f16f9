# SPDX-License-Identifier: Apache-2.0
"""Step-level continuous batching: every engine step is one denoise step of every running request.

Requests wait in order of arrival. One is admitted when the planner says that its steps fit beside
those that run, and refused when they would not fit alone; it stays until its answer is complete.
One that does not fit lets later ones that do pass, but only so many: then everybody waits until it
has started. So small requests do not wait for room that only a large one needs, and no stream of
small ones can keep a large one out. The worker owns the canvas; the scheduler sees only the tokens
that became final. What memory there is it learns from the worker's first answer, so the first step
of all is empty.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.diffusion import metrics
from vllm.diffusion.config import served_model
from vllm.diffusion.decision import decision_of
from vllm.diffusion.engine.messages import (
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    NewCanvas,
    StepResult,
    StepUsage,
)
from vllm.diffusion.engine.sizes import demand_of, make_planner
from vllm.diffusion.errors import ActivationBudgetError, InvalidParameterError
from vllm.diffusion.lengths import forwards_saved
from vllm.diffusion.params import SEED_BITS
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.diffusion.memory import Demand, Planner
    from vllm.diffusion.params import DiffusionParams
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request

logger = init_logger(__name__)

MAX_OVERTAKEN = 16  # requests that may start before one that came earlier
MAX_PASSED = 16  # waiting requests that do not fit and are looked past in one step
STATISTICS_S = 0.1  # between two messages that tell of nothing but statistics


@dataclass
class _Scheduled:
    """A request with its decided parameters, from arrival to its last token."""

    request: Request
    params: DiffusionParams
    demand: Demand
    started: float = 0.0  # time.monotonic() of admission
    num_overtaken: int = 0  # later requests that have started before it
    num_forwards: int = 0
    num_committed: int = 0
    largest: StepUsage | None = None  # of its steps, the one with the highest peak

    def take_part(self, usage: StepUsage | None) -> None:
        """It took part in a step that used so much memory."""
        if usage is not None and (
            self.largest is None or usage.peak_bytes > self.largest.peak_bytes
        ):
            self.largest = usage


@dataclass
class _Queues:
    waiting: deque[_Scheduled] = field(default_factory=deque)
    running: dict[str, _Scheduled] = field(default_factory=dict)
    refused: list[tuple[Request, str]] = field(default_factory=list)


class DiffusionScheduler(SchedulerInterface):
    """Implements upstream's scheduler interface for canvases instead of growing sequences."""

    connector = None
    ec_connector = None

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
        self._model = served_model(vllm_config)
        self._max_running: int = vllm_config.scheduler_config.max_num_seqs
        self._vllm_config = vllm_config
        self._planner: Planner | None = None  # until the worker has said what memory there is
        self.last_usage: StepUsage | None = None
        self._log_stats = log_stats
        self._seen = metrics.Observations(enabled=log_stats)
        self._last_report = 0.0  # time.monotonic() of the newest results
        self._last_statistics = 0.0  # the same clock, when statistics were sent
        self._peak_bytes = 0
        self._queues = _Queues()
        self._pause_state = PauseState.UNPAUSED
        self._finished_req_ids: set[str] = set()
        self._finished_by_client: dict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )

    # ---- requests come and go ----

    def add_request(self, request: Request) -> None:
        """Queue a request, with the decision that it brings; what fails here ends as an error."""
        if self._log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        try:
            prompt = request.prompt_token_ids or []
            decided = decision_of(request.sampling_params, self._model, prompt)
        except InvalidParameterError as error:
            self._seen.count(metrics.REQUESTS_REFUSED, label="engine")
            self._queues.refused.append((request, str(error)))
            return
        if decided.seed is None:
            decided = decided.with_seed(secrets.randbits(SEED_BITS))
        demand = demand_of(decided, request.num_prompt_tokens)
        self._queues.waiting.append(_Scheduled(request, decided, demand))

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if request_ids is None:
            wanted = {*self._queues.running, *(w.request.request_id for w in self._queues.waiting)}
        else:
            wanted = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        ended = [self._queues.running[i].request for i in wanted if i in self._queues.running]
        still_waiting = deque[_Scheduled]()
        for item in self._queues.waiting:
            if item.request.request_id in wanted:
                ended.append(item.request)
            else:
                still_waiting.append(item)
        self._queues.waiting = still_waiting
        for request in ended:
            self._end(request, finished_status)
        return ended

    def _end(self, request: Request, status: RequestStatus) -> None:
        request.status = status
        item = self._queues.running.pop(request.request_id, None)
        if item is not None:
            self._finished_req_ids.add(request.request_id)
            self._observe_end(item, status)
        if self._finished_by_client is not None:
            self._finished_by_client[request.client_index].add(request.request_id)

    # ---- one step ----

    def schedule(self, throttle_prefills: bool = False) -> DiffusionSchedulerOutput:
        admitted = self._admit() if self._pause_state == PauseState.UNPAUSED else []
        running = self._queues.running
        stepping = {} if self._pause_state == PauseState.PAUSED_ALL else running
        rows = {req_id: item.demand.rows for req_id, item in stepping.items()}
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
            scheduled_at=time.monotonic(),
        )

    def _admit(self) -> list[NewCanvas]:
        admitted: list[NewCanvas] = []
        passed: list[_Scheduled] = []  # came earlier, do not fit now; the first was passed most
        planner = self._planner
        if planner is None:
            return admitted
        for item in list(self._queues.waiting):
            if passed and passed[0].num_overtaken >= MAX_OVERTAKEN:
                break
            if self._is_refused(item, planner):
                self._queues.waiting.remove(item)
                continue
            if not self._may_start(item, planner):
                passed.append(item)
                if len(passed) == MAX_PASSED:
                    break
                continue
            for earlier in passed:
                earlier.num_overtaken += 1
            self._queues.waiting.remove(item)
            admitted.append(self._start(item))
        return admitted

    def _start(self, item: _Scheduled) -> NewCanvas:
        item.started = time.monotonic()
        item.request.status = RequestStatus.RUNNING
        self._seen.observe(metrics.QUEUE_TIME, _seconds_since_arrival(item.request))
        if self._log_stats:
            item.request.record_event(EngineCoreEventType.SCHEDULED)
        self._queues.running[item.request.request_id] = item
        prompt = list(item.request.prompt_token_ids or [])
        return NewCanvas(item.request.request_id, prompt, item.params)

    def _is_refused(self, item: _Scheduled, planner: Planner) -> bool:
        """Whether it would not fit alone; then its refusal is on its way."""
        try:
            planner.check(item.demand)
        except ActivationBudgetError as error:
            self._seen.count(metrics.REQUESTS_REFUSED, label="memory")
            self._queues.refused.append((item.request, str(error)))
            return True
        return False

    def _may_start(self, item: _Scheduled, planner: Planner) -> bool:
        running = self._queues.running.values()
        if not running:
            return True
        if item.params.force_single_batch or any(r.params.force_single_batch for r in running):
            return False
        if len(running) >= self._max_running:
            return False
        return planner.admits([r.demand for r in running], item.demand)

    def update_from_output(
        self, scheduler_output: DiffusionSchedulerOutput, model_runner_output: DiffusionRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._observe_step(scheduler_output, model_runner_output)
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        self._learn(model_runner_output.usage)
        for request, message in self._queues.refused:
            outputs[request.client_index].append(self._refuse(request, message))
        self._queues.refused = []
        for req_id, result in model_runner_output.results.items():
            item = self._queues.running.get(req_id)
            if item is None:
                continue  # aborted while the step ran
            item.take_part(model_runner_output.usage)
            output = self._advance(item, result)
            if output is not None:
                outputs[item.request.client_index].append(output)
        return self._envelopes(outputs)

    def _observe_step(self, step: DiffusionSchedulerOutput, done: DiffusionRunnerOutput) -> None:
        if done.usage is not None:
            self._peak_bytes = max(self._peak_bytes, done.usage.peak_bytes)
            self._seen.observe(metrics.POOL_BUDGET, done.usage.budget_bytes)
            self._seen.observe(metrics.POOL_IN_USE, done.usage.in_use_bytes)
            self._seen.observe(metrics.POOL_PEAK, self._peak_bytes)
        if not done.results:
            return
        if done.usage is not None:
            self._seen.observe(metrics.PLANNER_TIME, done.usage.planner_us / 1e6)
        now = time.monotonic()
        self._seen.count(metrics.DENOISE_STEPS)
        self._seen.observe(metrics.STEP_BATCH_SIZE, len(done.results))
        self._seen.observe(metrics.STEP_ROWS, done.num_rows)
        # A step may be scheduled before the results of the one before it are known.
        self._seen.observe(metrics.STEP_TIME, now - max(step.scheduled_at, self._last_report))
        self._last_report = now

    def _observe_progress(self, item: _Scheduled, result: StepResult) -> None:
        self._seen.count(metrics.FORWARDS, result.num_forwards - item.num_forwards)
        self._seen.count(metrics.COMMITTED_TOKENS, result.num_committed - item.num_committed)
        if result.num_committed and not item.num_committed:
            waited = _seconds_since_arrival(item.request)
            self._seen.observe(metrics.TIME_TO_FIRST_COMMIT, waited)
        item.num_forwards, item.num_committed = result.num_forwards, result.num_committed

    def _learn(self, usage: StepUsage | None) -> None:
        """Take in what memory there is, and what the step took of it."""
        if usage is None:
            return
        self.last_usage = usage
        if self._planner is None or self._planner.budget_bytes != usage.budget_bytes:
            self._planner = make_planner(self._vllm_config, usage.budget_bytes)

    def _observe_end(self, item: _Scheduled, status: RequestStatus) -> None:
        if not item.num_forwards:
            return
        self._seen.observe(metrics.TOKENS_PER_FORWARD, item.num_committed / item.num_forwards)
        if status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            saved = forwards_saved(item.params, item.num_forwards, item.num_committed)
            self._seen.count(metrics.FORWARDS_SAVED, saved)

    def _refuse(self, request: Request, message: str) -> EngineCoreOutput:
        logger.warning("request %s refused: %s", request.request_id, message)
        self._end(request, RequestStatus.FINISHED_ERROR)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            kv_transfer_params={"dllm": {"error": message}},
            events=request.take_events(),
            prefill_stats=self._prefill_stats(request),
        )

    def _advance(self, item: _Scheduled, result: StepResult) -> EngineCoreOutput | None:
        """Take in what became final; None when there is nothing to tell the client."""
        request = item.request
        if result.error is not None:
            self._seen.count(metrics.REQUESTS_REFUSED, label="engine")
            return self._refuse(request, result.error)
        self._observe_progress(item, result)
        new_token_ids = self._accept(item, result.new_token_ids)
        if result.scores is not None:
            request.status = RequestStatus.FINISHED_STOPPED
        elif not new_token_ids and result.canvas is None:
            return None
        request.append_output_token_ids(new_token_ids)
        if request.is_finished():
            self._end(request, request.status)
        logprobs = result.logprobs
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            new_logprobs=logprobs and logprobs.slice_request(0, len(new_token_ids)),
            finish_reason=request.get_finished_reason(),
            stop_reason=request.stop_reason,
            events=request.take_events(),
            kv_transfer_params=self._side_channel(item, result),
            trace_headers=request.trace_headers,
            prefill_stats=self._prefill_stats(request),
        )

    @staticmethod
    def _accept(item: _Scheduled, tokens: list[int]) -> list[int]:
        """The part of the new final tokens that belongs to the answer; sets the finish status."""
        request, decided = item.request, item.params
        end = decided.answer_end(tokens, request.num_output_tokens)
        if end is None:
            return tokens
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        if end and tokens[end - 1] in decided.stop_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = tokens[end - 1] if tokens[end - 1] != decided.eos_id else None
        return tokens[:end]

    @classmethod
    def _side_channel(cls, item: _Scheduled, result: StepResult) -> dict[str, Any] | None:
        """What upstream's output has no field for; its front end hands this through as it is.

        The report belongs to the last output. The front end finds stop strings by itself, so with
        them every output may be the last one.
        """
        told: dict[str, Any] = {}
        if item.request.is_finished() or item.request.sampling_params.stop:
            told |= cls._report(item, result)
        if result.canvas is not None:
            told["canvas"] = asdict(result.canvas)
        if result.scores is not None:
            told["scores"] = asdict(result.scores)
        return {"dllm": told} if told else None

    @staticmethod
    def _report(item: _Scheduled, result: StepResult) -> dict[str, Any]:
        waited = time.time() - item.request.arrival_time
        ran = time.monotonic() - item.started
        return {
            "steps": item.params.steps,
            "num_forwards": result.num_forwards,
            "num_forwards_saved": forwards_saved(
                item.params, result.num_forwards, result.num_committed
            ),
            "num_committed": result.num_committed,
            "queue_ms": round(1000 * max(waited - ran, 0.0), 3),
            "denoise_ms": round(1000 * ran, 3),
            "seed": item.params.seed,
            "ignored": list(item.params.ignored),
            **(item.largest.report() if item.largest is not None else {}),
            **({"infilled": result.infilled} if result.infilled else {}),
        }

    @staticmethod
    def _prefill_stats(request: Request) -> Any:
        stats = request.take_prefill_stats()
        if stats is not None:
            stats.set(request.num_prompt_tokens, 0, 0)
        return stats

    def _envelopes(
        self, outputs: dict[int, list[EngineCoreOutput]]
    ) -> dict[int, EngineCoreOutputs]:
        envelopes = {client: EngineCoreOutputs(outputs=part) for client, part in outputs.items()}
        if self._finished_by_client:
            for client, req_ids in self._finished_by_client.items():
                envelopes.setdefault(client, EngineCoreOutputs()).finished_requests = req_ids
            self._finished_by_client.clear()
        stats = self.make_stats() if envelopes or self._are_statistics_due() else None
        if stats is not None:
            first = next(iter(envelopes), 0)
            envelopes.setdefault(first, EngineCoreOutputs()).scheduler_stats = stats
        return envelopes

    def _are_statistics_due(self) -> bool:
        """Whether they travel without an output: it costs the server as much as a small step."""
        is_idle = self.get_num_unfinished_requests() == 0
        return is_idle or time.monotonic() - self._last_statistics >= STATISTICS_S

    # ---- state that upstream asks for ----

    def get_num_unfinished_requests(self) -> int:
        queues = self._queues
        return len(queues.waiting) + len(queues.running) + len(queues.refused)

    def has_finished_requests(self) -> bool:
        return bool(self._finished_req_ids)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self._queues.running), len(self._queues.waiting)

    def make_stats(self) -> SchedulerStats | None:
        if not self._log_stats:
            return None
        self._last_statistics = time.monotonic()
        running, waiting = self.get_request_counts()
        stats = SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting)
        self._seen.put_into(stats)
        return stats

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state

    def shutdown(self) -> None:
        pass

    # ---- parts of upstream's interface without a meaning for canvases ----

    def get_grammar_bitmask(self, scheduler_output: Any) -> GrammarOutput | None:
        return None

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        pass

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: Any
    ) -> None:
        pass

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return True

    def reset_encoder_cache(self) -> None:
        pass


def _seconds_since_arrival(request: Request) -> float:
    """The arrival was stamped by the server's process, so by the clock that they share."""
    return float(max(time.time() - request.arrival_time, 0.0))

# SPDX-License-Identifier: Apache-2.0
"""Step-level continuous batching: every engine step is one denoise step of every running request.

Requests wait in order of arrival. One is admitted when the planner says that its rows fit beside
those that run; it stays until its answer is complete. The worker owns the canvas; the scheduler
sees only the tokens that became final.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict, deque
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.diffusion import params
from vllm.diffusion.config import decide, row_budget, served_model
from vllm.diffusion.engine.messages import (
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    NewCanvas,
    StepResult,
)
from vllm.diffusion.errors import InvalidParameterError
from vllm.diffusion.lengths import forwards_saved
from vllm.diffusion.memory import Demand, Planner
from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.diffusion.params import DiffusionParams
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request

logger = init_logger(__name__)


@dataclass
class _Scheduled:
    """A request with its decided parameters, from arrival to its last token."""

    request: Request
    params: DiffusionParams
    started: float = 0.0  # time.monotonic() of admission

    @property
    def demand(self) -> Demand:
        """What it takes while it runs; guidance runs the sequence twice."""
        length = self.request.num_prompt_tokens + self.params.gen_length
        return Demand(
            rows=2 * length if self.params.cfg_scale > 0 else length,
            cached_positions=0 if self.params.cache == "none" else length,
        )


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
        self._planner = Planner(
            row_budget(vllm_config), self._model.vocab_size, self._model.cached_positions
        )
        self._log_stats = log_stats
        self._queues = _Queues()
        self._pause_state = PauseState.UNPAUSED
        self._finished_req_ids: set[str] = set()
        self._finished_by_client: dict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )

    # ---- requests come and go ----

    def add_request(self, request: Request) -> None:
        """Queue a request. It was validated at the door; what fails here ends as an error."""
        if self._log_stats:
            request.record_event(EngineCoreEventType.QUEUED)
        try:
            decided = decide(request.sampling_params, self._model, request.prompt_token_ids or [])
        except InvalidParameterError as error:
            self._queues.refused.append((request, str(error)))
            return
        if decided.seed is None:
            decided = decided.with_seed(secrets.randbits(params.SEED_BITS))
        self._queues.waiting.append(_Scheduled(request, decided))

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
        if self._queues.running.pop(request.request_id, None) is not None:
            self._finished_req_ids.add(request.request_id)
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
        )

    def _admit(self) -> list[NewCanvas]:
        admitted = []
        while self._queues.waiting and self._may_start(self._queues.waiting[0]):
            item = self._queues.waiting.popleft()
            item.started = time.monotonic()
            item.request.status = RequestStatus.RUNNING
            if self._log_stats:
                item.request.record_event(EngineCoreEventType.SCHEDULED)
            self._queues.running[item.request.request_id] = item
            prompt = list(item.request.prompt_token_ids or [])
            admitted.append(NewCanvas(item.request.request_id, prompt, item.params))
        return admitted

    def _may_start(self, item: _Scheduled) -> bool:
        running = self._queues.running.values()
        if not running:
            return True
        if item.params.force_single_batch or any(r.params.force_single_batch for r in running):
            return False
        if len(running) >= self._max_running:
            return False
        return self._planner.admits([r.demand for r in running], item.demand)

    def update_from_output(
        self, scheduler_output: DiffusionSchedulerOutput, model_runner_output: DiffusionRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        for request, message in self._queues.refused:
            outputs[request.client_index].append(self._refuse(request, message))
        self._queues.refused = []
        for req_id, result in model_runner_output.results.items():
            item = self._queues.running.get(req_id)
            if item is None:
                continue  # aborted while the step ran
            output = self._advance(item, result)
            if output is not None:
                outputs[item.request.client_index].append(output)
        return self._envelopes(outputs)

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
            return self._refuse(request, result.error)
        new_token_ids = self._accept(item, result.new_token_ids)
        if not new_token_ids and result.canvas is None:
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
        """The part of the new final tokens that belongs to the answer; sets the finish status.

        A stop token ends the answer and is its last token; the length limit comes second.
        """
        request, decided = item.request, item.params
        room = decided.max_tokens - request.num_output_tokens
        for index, token in enumerate(tokens[:room]):
            if token in decided.stop_ids:
                request.status = RequestStatus.FINISHED_STOPPED
                request.stop_reason = token if token != decided.eos_id else None
                return tokens[: index + 1]
        if len(tokens) >= room:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return tokens[:room]

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
        stats = self.make_stats()
        if stats is not None:
            first = next(iter(envelopes), 0)
            envelopes.setdefault(first, EngineCoreOutputs()).scheduler_stats = stats
        return envelopes

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
        running, waiting = self.get_request_counts()
        return SchedulerStats(num_running_reqs=running, num_waiting_reqs=waiting)

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

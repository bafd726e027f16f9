# SPDX-License-Identifier: Apache-2.0
"""The hot path: one denoise step of every running request."""

from __future__ import annotations

import logging
import time
from contextlib import closing, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion import envs, ops
from vllm.diffusion.engine.batch import StepBatch, build_batch
from vllm.diffusion.engine.canvas import Canvas
from vllm.diffusion.engine.forward import read_last_layer, run_body, upload, upload_reads
from vllm.diffusion.engine.graphs import GraphRunner
from vllm.diffusion.engine.head import PooledHead
from vllm.diffusion.engine.messages import (
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    StepResult,
    StepUsage,
)
from vllm.diffusion.engine.streamed import StreamedForward
from vllm.diffusion.errors import ActivationBudgetError
from vllm.diffusion.memory import CachePool, HostBuffers, PoolExhaustedError, UsageMeter
from vllm.diffusion.memory.footprint import INPUT_BYTES, READ_INPUT_BYTES, RESULT_BYTES
from vllm.diffusion.memory.planner import readable
from vllm.diffusion.sampling import NoiseSource, PhiloxNoise, sample
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from vllm.diffusion.decoding import Candidates
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.memory import ActivationPool, GraphMemory, Plan, Planner
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.sampling import RowGroup

    HiddenParts = Generator[tuple[torch.Tensor, tuple[RowGroup, ...]]]

logger = init_logger(__name__)

SLOW_STEP_MS = 100.0  # steps from here on are logged at INFO
OUT_OF_MEMORY = (torch.OutOfMemoryError, PoolExhaustedError, ActivationBudgetError)


class _Step(NamedTuple):
    """A step that the device has been given."""

    started: float  # time.perf_counter() before its first instruction
    batch: StepBatch
    sampled: ops.HostCopy
    memory: _StepMemory
    starved: Mapping[str, Exception] = MappingProxyType({})  # requests it had no memory for

    @property
    def req_ids(self) -> list[str]:
        return [canvas.req_id for canvas in self.batch.canvases]


class _StepMemory(NamedTuple):
    """What a step took of the pool, as far as the host knows it when the step is launched."""

    plan: Plan
    planner_us: float
    pool_peak_bytes: int
    unseen_bytes: int  # of the budget, taken by what the pool does not see
    meter: UsageMeter | None  # where the average is measured; else it is as planned

    def usage(self, budget_bytes: int, in_use_bytes: int) -> StepUsage:
        """To be asked when the step is over."""
        plan, peak = self.plan, self.unseen_bytes + self.pool_peak_bytes
        if self.meter is not None:
            average = self.unseen_bytes + self.meter.usage().average_bytes
        else:
            average = peak * plan.predicted_average_bytes / max(plan.predicted_peak_bytes, 1)
        return StepUsage(budget_bytes, in_use_bytes, peak, round(average), self.planner_us)


class _FailedStep(NamedTuple):
    """A step that could not be launched; its requests hear of it when its turn comes."""

    req_ids: list[str]
    error: Exception


class DiffusionModelRunner:
    """Owns the canvases of the running requests and moves them one step at a time.

    Args:
        model: the loaded model.
        planner: chunk sizes of a step.
        pool: the memory of steps and of kept keys and values, on the model's device.
        device: where the model lives.
        is_reporting: this rank writes the log lines of steps.
        may_fail_alone: an error inside a step may be turned into an error of its requests; False
            where other ranks run the same step and would wait for this one.
        graph_memory: where CUDA graphs of the layers may live; None runs without graphs.
        max_model_len: the longest sequence.

    Attributes:
        runs_ahead: a step is launched before the results of the one before are handed out.
    """

    def __init__(
        self,
        model: DiffusionModel,
        planner: Planner,
        pool: ActivationPool,
        device: torch.device,
        *,
        is_reporting: bool = True,
        may_fail_alone: bool = True,
        graph_memory: GraphMemory | None = None,
        max_model_len: int = 0,
        noise: NoiseSource | None = None,
    ) -> None:
        self.model = model
        self.planner = planner
        self.device = device
        self.noise = noise or PhiloxNoise()
        self.pool = pool
        self.host = HostBuffers(is_pinned=device.type == "cuda")
        self.caches = CachePool(
            len(model.layers), model.num_kv_heads, model.head_dim, model.dtype, pool
        )
        self.graphs: GraphRunner | None = None
        if graph_memory is not None:
            self.graphs = GraphRunner(model, pool, self.caches, graph_memory, max_model_len)
        self._head = PooledHead(model, pool)
        self._last_sizes: tuple[int, ...] = ()
        self._last_told: tuple[int, tuple[int, ...]] | None = None
        self._usage = self._idle_usage()
        self.canvases: dict[str, Canvas] = {}
        self.runs_ahead = device.type == "cuda"
        self._ahead: _Step | _FailedStep | None = None
        self._num_rows = 0  # of the newest step whose results were handed out
        self._is_reporting = is_reporting
        self._may_fail_alone = may_fail_alone
        self._log_every_step = envs.log_diffusion_steps()

    def execute(self, message: DiffusionSchedulerOutput) -> DiffusionRunnerOutput:
        """Take in started and finished requests, then give the results of one step.

        Where the device works by itself (`runs_ahead`), the next step is launched before the
        results are handed out, so that it computes while they are on their way to the clients.
        Requests that start while a step is under way take part in the one after it.
        """
        for req_id in message.finished_req_ids:
            self._forget(req_id)
        results: dict[str, StepResult] = {}
        for new in message.admitted:
            error = self._start(new)
            if error is not None:
                results[new.req_id] = self._failure(new.req_id, error)
        req_ids = list(message.num_scheduled_tokens)
        stepping = [req_id for req_id in req_ids if req_id not in results]
        if stepping:
            results |= self._advance(stepping)
        return DiffusionRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            results=results,
            usage=self._usage if req_ids else self._idle_usage(),
            num_rows=self._num_rows if req_ids else 0,
        )

    def run_alone(self, requests: Sequence[NewCanvas]) -> None:
        """One step of requests that are forgotten afterwards; errors are raised."""
        for new in requests:
            self.canvases[new.req_id] = self._new_canvas(new)
        try:
            with torch.inference_mode():
                self.collect(self.launch([new.req_id for new in requests]))
        finally:
            for new in requests:
                self._forget(new.req_id)

    def launch(self, req_ids: list[str]) -> _Step:
        """Give the device one denoise step of the named requests, and do not wait for a GPU."""
        started = time.perf_counter()
        batch = build_batch(
            [self.canvases[req_id] for req_id in req_ids], self.model.family.logit_shift
        )
        plan_started = time.perf_counter()
        plan = self._plan(batch)
        planner_us = 1e6 * (time.perf_counter() - plan_started)
        meter = self._begin_measuring(plan, batch.num_rows)
        with closing(self._forward(batch, plan)) as hidden:
            sampled = sample(self._head, hidden, self.noise)
        self.pool.measure(None)
        memory = _StepMemory(plan, planner_us, self.pool.peak_bytes, self._unseen_bytes, meter)
        return _Step(started, batch, ops.HostCopy(sampled), memory)

    def collect(self, step: _Step) -> dict[str, StepResult]:
        """Commit what a step found; requests that have gone meanwhile get nothing."""
        candidates = step.batch.candidates(step.sampled.wait(), self.noise)
        parts = zip(step.batch.canvases, candidates, strict=True)
        return {
            canvas.req_id: self._commit(canvas, found)
            for canvas, found in parts
            if self.canvases.get(canvas.req_id) is canvas
        }

    @torch.inference_mode()
    def _advance(self, req_ids: list[str]) -> dict[str, StepResult]:
        step = self._ahead or self._try_launch(req_ids)
        results = self._try_collect(step)
        going_on = [req_id for req_id in req_ids if self._goes_on(req_id, results)]
        self._ahead = self._try_launch(going_on) if self._may_run_ahead(going_on) else None
        return results

    def _try_launch(self, req_ids: list[str]) -> _Step | _FailedStep:
        """Launch a step; where memory runs out, without the requests that take most.

        What other steps have left behind is given back first, and the same step tried again.
        """
        starved: dict[str, Exception] = {}
        has_trimmed = False
        while True:
            try:
                return self.launch(req_ids)._replace(starved=starved)
            except Exception as error:
                if not self._may_fail_alone:
                    raise
                is_last = has_trimmed and len(req_ids) == 1
                if not isinstance(error, OUT_OF_MEMORY) or is_last:
                    return _FailedStep([*starved, *req_ids], error)
                failure = error.with_traceback(None)  # whose frames hold tensors
            if has_trimmed:
                largest = self._largest(req_ids)
                starved[largest] = failure
                req_ids = [req_id for req_id in req_ids if req_id != largest]
                self.caches.release(largest)
            self.pool.trim()
            has_trimmed = True

    def _largest(self, req_ids: list[str]) -> str:
        """The request with the most rows, of several the last to come."""
        return max(reversed(req_ids), key=lambda req_id: self.canvases[req_id].most_rows)

    def _try_collect(self, step: _Step | _FailedStep) -> dict[str, StepResult]:
        self._num_rows = 0 if isinstance(step, _FailedStep) else step.batch.num_rows
        try:
            if isinstance(step, _FailedStep):
                raise step.error
            results = self.collect(step)
        except Exception as error:
            if not self._may_fail_alone:
                raise
            req_ids = [req_id for req_id in step.req_ids if req_id in self.canvases]
            logger.exception("denoise step failed; its %d requests end", len(req_ids))
            return {req_id: self._failure(req_id, error) for req_id in req_ids}
        for req_id, reason in step.starved.items():
            if req_id in self.canvases:
                logger.warning("request %s ends: %s", req_id, reason)
                results[req_id] = self._failure(req_id, reason)
        self._usage = step.memory.usage(self.budget_bytes, self.caches.num_bytes)
        self._log(step)
        return results

    def _goes_on(self, req_id: str, results: dict[str, StepResult]) -> bool:
        has_failed = req_id in results and results[req_id].error is not None
        return not has_failed and not self.canvases[req_id].is_complete

    def _may_run_ahead(self, req_ids: list[str]) -> bool:
        """Whether the next step can be launched at once.

        A step in chunks launches more kernels than a GPU's queue holds, so launching would wait
        for it.
        """
        num_rows = sum(self.canvases[req_id].most_rows for req_id in req_ids)
        if not self.runs_ahead or num_rows == 0:
            return False
        return self.planner.runs_whole(num_rows, self._kept_bytes)

    def _plan(self, batch: StepBatch) -> Plan:
        """How the rows are cut; caches give back what they do not need where it is wanted."""
        shape, num_found = batch.shape, self.planner.num_found
        try:
            plan = self.planner.plan(shape, self._kept_bytes)
        except ActivationBudgetError:
            self.caches.trim()
            plan = self.planner.plan(shape, self._kept_bytes)
        if self.planner.num_found > num_found and self._is_reporting:
            self._tell(shape.rows, plan)
        return plan

    def _tell(self, num_rows: int, plan: Plan) -> None:
        """Log a new plan; steps that differ in the rows that are read alone are cut alike."""
        told = (num_rows, plan.sizes)
        is_known = told == self._last_told
        self._last_told = told
        level = logging.DEBUG if is_known or plan.is_whole(num_rows) else logging.INFO
        free = self.planner.budget_bytes - self._kept_bytes
        logger.log(level, "plan for T = %d with %s: %s", num_rows, readable(free), plan)

    def _begin_measuring(self, plan: Plan, num_rows: int) -> UsageMeter | None:
        """Times cost a GPU's host two events a stage: small steps do without."""
        self.pool.reset_peak()
        if self.device.type == "cuda" and plan.is_whole(num_rows):
            return None
        meter = UsageMeter(self.device)
        self.pool.measure(meter)
        return meter

    def _forward(self, batch: StepBatch, plan: Plan) -> HiddenParts:
        """Hidden states of the rows to sample, part by part, within the memory of the step."""
        pool, model, caches = self.pool, self.model, self.caches
        body = None if self.graphs is None else self.graphs.run(batch, plan)
        parts = list(batch.read_parts(plan.logits_rows))  # while the graph runs, if there is one
        if not plan.is_whole(batch.num_rows) and plan.sizes != self._last_sizes:
            pool.trim()  # buffers and PyTorch's temporaries of other sizes
            self._last_sizes = plan.sizes
        with pool.scope("step"), nullcontext() if body is not None else pool.temporaries():
            pool.expect("inputs", batch.num_rows * INPUT_BYTES)
            pool.expect("results", batch.shape.read_rows * (READ_INPUT_BYTES + RESULT_BYTES))
            if body is not None:
                reads = upload_reads(parts, self.device)
                yield from read_last_layer(model, batch, body, reads, pool, caches)
                return
            inputs, reads = upload(batch, plan, parts, self.device)
            if plan.is_streamed:
                streamed = StreamedForward(model, plan, inputs, pool, self.host, caches)
                yield from streamed.read(batch, reads)
                return
            body = run_body(model, inputs, plan, pool, pool, caches)
            yield from read_last_layer(model, batch, body, reads, pool, caches)

    # ---- what memory is used ----

    @property
    def budget_bytes(self) -> int:
        """What steps and kept keys and values may take together."""
        return self.planner.budget_bytes - self._fixed_bytes

    @property
    def _fixed_bytes(self) -> int:
        """What is never given back: graphs, and what they write into."""
        graphs = 0 if self.graphs is None else self.graphs.used_bytes
        return graphs + self.pool.outermost_bytes

    @property
    def _unseen_bytes(self) -> int:
        """Of what is fixed, what the pool does not count itself."""
        if self.graphs is None or self.pool.graph_bytes is not None:
            return 0
        return self.graphs.used_bytes

    @property
    def _kept_bytes(self) -> int:
        """What outlives a step."""
        return self._fixed_bytes + self.caches.reserved_bytes

    def _idle_usage(self) -> StepUsage:
        return StepUsage(self.budget_bytes, self.caches.num_bytes)

    def _log(self, step: _Step) -> None:
        if not self._is_reporting:
            return
        elapsed_ms = 1000 * (time.perf_counter() - step.started)
        at_info = self._log_every_step or elapsed_ms >= SLOW_STEP_MS
        (logger.info if at_info else logger.debug)(
            "execute_diffusion_once time = %.3f ms, requests = %d, rows = %d, sampled = %d",
            elapsed_ms,
            len(step.batch.canvases),
            step.batch.num_rows,
            step.batch.num_sampled,
        )
        if not logger.isEnabledFor(logging.DEBUG):
            return
        usage = self._usage
        logger.debug(
            "memory of the step: peak = %d bytes, average = %d, peak/average = %.3f, budget = %d, "
            "plan in %.0f us",
            usage.peak_bytes,
            usage.average_bytes,
            usage.peak_bytes / max(usage.average_bytes, 1),
            usage.budget_bytes,
            usage.planner_us,
        )

    def _forget(self, req_id: str) -> None:
        self.canvases.pop(req_id, None)
        self.caches.release(req_id)
        if not self.canvases:
            self._ahead = None  # nobody waits for it

    def _start(self, new: NewCanvas) -> Exception | None:
        """Take in a request; why it cannot start, if there is no memory for what it keeps."""
        try:
            try:
                self.canvases[new.req_id] = self._new_canvas(new)
            except OUT_OF_MEMORY:
                self.pool.trim()  # what steps have left behind
                self.canvases[new.req_id] = self._new_canvas(new)
        except OUT_OF_MEMORY as error:
            if not self._may_fail_alone:
                raise
            logger.warning("request %s ends: %s", new.req_id, error)
            return error
        return None

    def _new_canvas(self, new: NewCanvas) -> Canvas:
        if new.params.cache == "none":
            return Canvas(new)
        length = len(new.prompt_token_ids) + new.params.gen_length
        return Canvas(new, self.caches.allocate(new.req_id, length))

    def _commit(self, canvas: Canvas, candidates: Candidates) -> StepResult:
        """A request whose decoding fails ends alone; every rank sees the same failure."""
        try:
            return canvas.commit(candidates)
        except Exception as error:
            logger.exception("decoding of request %s failed", canvas.req_id)
            return self._failure(canvas.req_id, error)

    def _failure(self, req_id: str, error: Exception) -> StepResult:
        canvas = self.canvases.get(req_id)
        return StepResult(
            new_token_ids=[],
            num_forwards=0 if canvas is None else canvas.num_forwards,
            num_committed=0,
            error=f"{type(error).__name__}: {error}",
        )

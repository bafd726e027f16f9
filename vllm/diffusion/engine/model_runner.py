# SPDX-License-Identifier: Apache-2.0
"""The hot path: one denoise step of every running request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion import envs, ops
from vllm.diffusion.engine.batch import StepBatch, build_batch
from vllm.diffusion.engine.canvas import Canvas
from vllm.diffusion.engine.forward import read_last_layer, run_body, upload, upload_reads
from vllm.diffusion.engine.graphs import GraphRunner
from vllm.diffusion.engine.messages import (
    DiffusionRunnerOutput,
    DiffusionSchedulerOutput,
    StepResult,
)
from vllm.diffusion.memory import BufferPool, CachePool, Planner
from vllm.diffusion.sampling import NoiseSource, PhiloxNoise, sample
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.diffusion.decoding import Candidates
    from vllm.diffusion.engine.messages import NewCanvas
    from vllm.diffusion.memory import GraphMemory, Plan
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.sampling import RowGroup

    HiddenParts = Iterator[tuple[torch.Tensor, tuple[RowGroup, ...]]]

logger = init_logger(__name__)

SLOW_STEP_MS = 100.0  # steps from here on are logged at INFO


class _Step(NamedTuple):
    """A step that the device has been given."""

    started: float  # time.perf_counter() before its first instruction
    batch: StepBatch
    sampled: ops.HostCopy

    @property
    def req_ids(self) -> list[str]:
        return [canvas.req_id for canvas in self.batch.canvases]


class _FailedStep(NamedTuple):
    """A step that could not be launched; its requests hear of it when its turn comes."""

    req_ids: list[str]
    error: Exception


class DiffusionModelRunner:
    """Owns the canvases of the running requests and moves them one step at a time.

    Args:
        model: the loaded model.
        planner: chunk sizes of a step.
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
        self.buffers = BufferPool(device)
        self.caches = CachePool(
            len(model.layers), model.num_kv_heads, model.head_dim, model.dtype, device
        )
        self.graphs: GraphRunner | None = None
        if graph_memory is not None:
            self.graphs = GraphRunner(model, self.buffers, self.caches, graph_memory, max_model_len)
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
        for new in message.admitted:
            self.canvases[new.req_id] = self._new_canvas(new)
        req_ids = list(message.num_scheduled_tokens)
        return DiffusionRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            results=self._advance(req_ids) if req_ids else {},
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
        plan = self.planner.plan(batch.num_rows)
        hidden = self._forward(batch, plan)
        sampled = sample(self.model, hidden, self.noise)
        return _Step(started, batch, ops.HostCopy(sampled))

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
        try:
            return self.launch(req_ids)
        except Exception as error:
            if not self._may_fail_alone:
                raise
            return _FailedStep(req_ids, error)

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
        return self.runs_ahead and num_rows > 0 and self.planner.plan(num_rows).is_whole(num_rows)

    def _forward(self, batch: StepBatch, plan: Plan) -> HiddenParts:
        """Hidden states of the rows to sample, part by part."""
        body = None if self.graphs is None else self.graphs.run(batch, plan)
        parts = list(batch.read_parts(plan.logits_rows))  # while the graph runs, if there is one
        if body is None:
            inputs, reads = upload(batch, plan, parts, self.device)
            body = run_body(self.model, inputs, plan, self.buffers, self.caches)
        else:
            reads = upload_reads(parts, self.device)
        return read_last_layer(self.model, batch, body, reads, self.caches)

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

    def _forget(self, req_id: str) -> None:
        self.canvases.pop(req_id, None)
        self.caches.release(req_id)
        if not self.canvases:
            self._ahead = None  # nobody waits for it

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

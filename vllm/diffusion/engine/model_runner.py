# SPDX-License-Identifier: Apache-2.0
"""The hot path: one denoise step of every running request."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from vllm.diffusion import envs
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
        self._is_reporting = is_reporting
        self._may_fail_alone = may_fail_alone
        self._log_every_step = envs.log_diffusion_steps()

    def execute(self, message: DiffusionSchedulerOutput) -> DiffusionRunnerOutput:
        """Take in started and finished requests, then run the step that `message` asks for."""
        for req_id in message.finished_req_ids:
            self._forget(req_id)
        for new in message.admitted:
            self.canvases[new.req_id] = self._new_canvas(new)
        req_ids = list(message.num_scheduled_tokens)
        results: dict[str, StepResult] = {}
        num_rows = 0
        if req_ids:
            try:
                num_rows, results = self._timed_step(req_ids)
            except Exception as error:
                if not self._may_fail_alone:
                    raise
                logger.exception("denoise step failed; its %d requests end", len(req_ids))
                results = {req_id: self._failure(req_id, error) for req_id in req_ids}
        return DiffusionRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            results=results,
            num_rows=num_rows,
        )

    def step(self, req_ids: list[str]) -> tuple[StepBatch, dict[str, StepResult]]:
        """One denoise step of the named requests."""
        batch = build_batch(
            [self.canvases[req_id] for req_id in req_ids], self.model.family.logit_shift
        )
        plan = self.planner.plan(batch.num_rows)
        hidden = self._forward(batch, plan)
        sampled = sample(self.model, hidden, self.noise)
        candidates = batch.candidates(sampled, self.noise)
        parts = zip(batch.canvases, candidates, strict=True)
        return batch, {canvas.req_id: self._commit(canvas, found) for canvas, found in parts}

    def run_alone(self, requests: Sequence[NewCanvas]) -> None:
        """One step of requests that are forgotten afterwards; errors are raised."""
        for new in requests:
            self.canvases[new.req_id] = self._new_canvas(new)
        try:
            with torch.inference_mode():
                self.step([new.req_id for new in requests])
        finally:
            for new in requests:
                self._forget(new.req_id)

    def _forward(self, batch: StepBatch, plan: Plan) -> HiddenParts:
        """Hidden states of the rows to sample, part by part."""
        parts = list(batch.read_parts(plan.logits_rows))
        body = None if self.graphs is None else self.graphs.run(batch, plan)
        if body is None:
            inputs, reads = upload(batch, plan, parts, self.device)
            body = run_body(self.model, inputs, plan, self.buffers, self.caches)
        else:
            reads = upload_reads(parts, self.device)
        return read_last_layer(self.model, batch, body, reads, self.caches)

    @torch.inference_mode()
    def _timed_step(self, req_ids: list[str]) -> tuple[int, dict[str, StepResult]]:
        start = time.perf_counter()
        batch, results = self.step(req_ids)
        elapsed_ms = 1000 * (time.perf_counter() - start)  # the copy of the candidates has waited
        if self._is_reporting:
            at_info = self._log_every_step or elapsed_ms >= SLOW_STEP_MS
            (logger.info if at_info else logger.debug)(
                "execute_diffusion_once time = %.3f ms, requests = %d, rows = %d, sampled = %d",
                elapsed_ms,
                len(req_ids),
                batch.num_rows,
                batch.num_sampled,
            )
        return batch.num_rows, results

    def _forget(self, req_id: str) -> None:
        self.canvases.pop(req_id, None)
        self.caches.release(req_id)

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

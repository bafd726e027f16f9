# SPDX-License-Identifier: Apache-2.0
"""Step guest that runs a long step in slices, with other steps in between.

This module keeps the generator over the step's chunks. The step's memory in the pool is a frame
that precedes the buffers of the steps that run meanwhile. The scheduler's message gives the work of
a slice in seconds, as predicted by the planner, so every rank stops after the same chunk. The
measured times of slices are only reported to the scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm.diffusion import ops
from vllm.diffusion.engine.long_steps import LongStepReport, PausedStep
from vllm.diffusion.engine.step_guest import StepGuest
from vllm.diffusion.engine.worker.sample_rows import SampleRows
from vllm.diffusion.engine.worker.step_memory import Step
from vllm.diffusion.memory import OUT_OF_MEMORY, HostBuffers

if TYPE_CHECKING:
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.long_steps import StepSlice
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.forward import Chunked
    from vllm.diffusion.engine.worker.runner import DiffusionModelRunner
    from vllm.diffusion.memory import Plan


@dataclass
class _SlicedStep:
    """A step between its slices; `layout_version` is that of the page store."""

    started: float  # time.perf_counter()
    rows: SampleRows
    plan: Plan
    planner_us: float
    work: Chunked[torch.Tensor]
    layout_version: int | None
    peak_bytes: int = 0
    next_s: float = 0.0  # predicted seconds of the next chunk

    @property
    def req_id(self) -> str:
        return self.rows.batch.items[0].req_id


class _Stopwatch:
    """Measures the time that a device takes from construction until `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._started, self._taken_s = time.perf_counter(), 0.0
        if device.type == "cuda":
            self._events = (
                torch.cuda.Event(enable_timing=True),
                torch.cuda.Event(enable_timing=True),
            )
            self._events[0].record()

    def stop(self) -> None:
        self._taken_s = time.perf_counter() - self._started
        if self._events is not None:
            self._events[1].record()

    @property
    def has_ended(self) -> bool:
        """Whether the device has reached `stop`."""
        return self._events is None or self._events[1].query()

    def wait(self) -> None:
        """Wait until the device has reached `stop`."""
        if self._events is not None:
            self._events[1].synchronize()

    @property
    def taken_s(self) -> float:
        """Measured seconds; valid once `has_ended`."""
        if self._events is None:
            return self._taken_s
        started, ended = self._events
        return float(started.elapsed_time(ended)) / 1000


class LongStepRunner(StepGuest):
    """Runs one long step at a time, slice by slice."""

    def __init__(self, runner: DiffusionModelRunner) -> None:
        super().__init__(runner)
        self._pool, self._caches = runner.pool, runner.caches
        # The steps in between need their own rows in host memory.
        self._host = HostBuffers(is_pinned=runner.device.type == "cuda")
        self._paused: _SlicedStep | None = None
        self._in_flight: deque[tuple[float, _Stopwatch]] = deque()  # predicted seconds of slices
        self._restarted: str | None = None  # request whose step has run out of memory once

    def run(self, part: StepSlice) -> Step | None:
        """Launch the next slice of a request's step; return the step after its last slice.

        Waits until the previous slice has ended. So a GPU has work while the host handles other
        steps, and its queue holds no more than this slice.
        """
        paused = self._paused
        canvas = self._runner.canvases[part.req_id]
        if paused is None or not self._can_continue(paused, canvas):
            self._drop()
            paused = self.begin(canvas, part)
        self._pool.reset_peak()
        watch = _Stopwatch(self._runner.device)
        done_s, sampled = self._advance(paused, part.seconds)
        watch.stop()
        if self._in_flight:
            self._in_flight[-1][1].wait()
        self._in_flight.append((done_s, watch))
        paused.peak_bytes = max(paused.peak_bytes, self._pool.peak_bytes)
        if sampled is None:
            return None
        self._drop()
        self._restarted = None
        account = self._runner.account
        memory = account.memory(paused.plan, paused.planner_us, peak_bytes=paused.peak_bytes)
        return Step(paused.started, paused.rows, ops.HostCopy(sampled), memory)

    def _can_continue(self, paused: _SlicedStep, canvas: Canvas) -> bool:
        """Whether the paused step belongs to this request and its keys and values have not moved.

        If they have moved, the step cannot continue, because the device holds their old addresses.
        """
        is_of_request = paused.rows.batch.items[0] is canvas
        return is_of_request and paused.layout_version == self._layout_of(canvas)

    def _layout_of(self, canvas: BatchItem) -> int | None:
        return None if canvas.window.cache is None else self._caches.layout_version

    def begin(self, canvas: Canvas, part: StepSlice) -> _SlicedStep:
        """Begin a step of one request, without computing any chunk; no other step may be paused."""
        batch, plan, planner_us = self._runner.planned([canvas], part.seconds)
        rows = SampleRows(batch)
        self._runner.account.make_room(batch.num_rows, plan)
        self._pool.begin_frame()
        self._paused = _SlicedStep(
            started=time.perf_counter(),
            rows=rows,
            plan=plan,
            planner_us=planner_us,
            work=self._runner.chunks(rows, plan, self._host),
            layout_version=self._layout_of(canvas),
        )
        return self._paused

    def _advance(self, paused: _SlicedStep, seconds: float) -> tuple[float, torch.Tensor | None]:
        """Run chunks of at most `seconds` predicted seconds, but at least one chunk.

        Returns:
            the predicted seconds of these chunks, and the samples if the step's last chunk has run.
        """
        done_s = 0.0
        with self._pool.within_frame(), self._pool.temporaries():
            try:
                while not done_s or done_s + paused.next_s <= seconds:
                    done_s += paused.next_s
                    paused.next_s = next(paused.work)
            except StopIteration as end:
                sampled: torch.Tensor = end.value
                return done_s, sampled
        return done_s, None

    def restarts(self, part: StepSlice, failure: Exception) -> bool:
        """Drop the step of a failed slice; return whether it starts again with the next slice.

        If memory ran out, memory that earlier steps have left reserved is released, and the step
        starts again. This happens once per request.
        """
        self._drop()
        if not isinstance(failure, OUT_OF_MEMORY) or self._restarted == part.req_id:
            return False
        self._restarted = part.req_id
        self._pool.trim()
        return True

    def output_fields(self) -> dict[str, Any]:
        """Return the paused step, and the times of slices that have ended since the last call."""
        paused = None
        if self._paused is not None:
            paused = PausedStep(self._paused.req_id, self._pool.frame_bytes)
        over = []
        while self._in_flight and self._in_flight[0][1].has_ended:
            over.append(self._in_flight.popleft())
        if paused is None and not over:
            return {}
        seconds, taken_s = sum(s for s, _ in over), sum(watch.taken_s for _, watch in over)
        return {"long_steps": LongStepReport(paused, seconds, taken_s, len(over))}

    def pages_changed(self, req_id: str, *, are_replaced: bool) -> None:
        if are_replaced:
            self._drop(req_id)

    def forget(self, req_id: str) -> None:
        self._drop(req_id)

    def removed(self, req_id: str) -> None:
        self._drop(req_id)

    def invalidate(self) -> None:
        self._drop()

    def release_memory(self, *, even_work: bool) -> bool:
        """Drop the paused step, which starts again later."""
        return even_work and self._drop()

    def _drop(self, req_id: str | None = None) -> bool:
        """Drop the paused step and release its memory; return whether there was one.

        With `req_id`, only the step of this request is dropped; None means any.
        """
        paused = self._paused
        if paused is None or req_id not in (None, paused.req_id):
            return False
        self._paused = None
        with self._pool.within_frame():
            paused.work.close()
        self._pool.end_frame()
        return True

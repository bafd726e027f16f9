# SPDX-License-Identifier: Apache-2.0
"""Run denoising steps: pack, plan, compute, sample and commit one step of the given requests.

`StepLoop` calls this module, decides which requests step next, and handles errors. Capabilities
that only some requests need take part as guests (`step_guest.py`).
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import nullcontext
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.errors import BrokenLogitsError
from vllm.diffusion.decoding import Candidates
from vllm.diffusion.engine.messages import StepUsage
from vllm.diffusion.engine.worker.agreement import Agreement
from vllm.diffusion.engine.worker.batch import build_batch
from vllm.diffusion.engine.worker.forward import ForwardPass, run_to_end
from vllm.diffusion.engine.worker.revised_canvas import make_canvas
from vllm.diffusion.engine.worker.sample_rows import SampleRows
from vllm.diffusion.engine.worker.step_graphs import GraphRunner
from vllm.diffusion.engine.worker.step_guests import guests_needed
from vllm.diffusion.engine.worker.step_log import StepLog
from vllm.diffusion.engine.worker.step_log import logger as step_logger
from vllm.diffusion.engine.worker.step_memory import PoolAccount, Step
from vllm.diffusion.engine.worker.streamed import run_streamed
from vllm.diffusion.memory import HostBuffers, PageAllocator, page_store_of
from vllm.diffusion.parallel.groups import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.diffusion.decoding import BatchedCommit
    from vllm.diffusion.engine.batch_item import BatchItem
    from vllm.diffusion.engine.messages import NewCanvas, NewPages
    from vllm.diffusion.engine.step_guest import StepGuest
    from vllm.diffusion.engine.worker.batch import Packing, StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.forward import BodyOutputs, Chunked
    from vllm.diffusion.memory import ActivationPool, GraphMemory, Plan, Planner
    from vllm.diffusion.models.base import DiffusionModel

G = TypeVar("G", bound="StepGuest")

# The requests of a step, each with the error that ended it, or None.
Outcomes: TypeAlias = "dict[str, Exception | None]"


class DiffusionModelRunner:
    """Owns the canvases of the running requests and moves them one step at a time.

    Args:
        pool: memory for steps and for cached keys and values, on the model's device.
        is_reporting: whether this rank writes the log lines of steps.
        agreement: agreement with the ranks that run the same steps; None for one rank.
        graph_memory: memory for CUDA graphs of the layers; None runs without graphs.
        max_model_len: positions of the longest sequence.
        ranks: ranks that compute the same steps; None for a single rank.

    Attributes:
        guests: capabilities of some requests that take part in steps; see `join`.
        epoch: number of times that cached results were dropped.
        usage: memory usage of the latest collected step.
        promise: fields of status and reports that promise equal bits; see `invariance`.
    """

    # Set by the worker. Worker extensions of trainers read it here.
    vllm_config: VllmConfig
    promise: Mapping[str, Any] = MappingProxyType({})  # set by the worker, too

    def __init__(
        self,
        model: DiffusionModel,
        planner: Planner,
        pool: ActivationPool,
        device: torch.device,
        *,
        is_reporting: bool = True,
        agreement: Agreement | None = None,
        graph_memory: GraphMemory | None = None,
        max_model_len: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self.model = model
        self.planner = planner
        self.device = device
        self.pool = pool
        self.host = HostBuffers(is_pinned=device.type == "cuda")
        self.caches = page_store_of(planner.shape, pool)
        self.pages = PageAllocator(self.caches, pool)
        self.agreement = agreement
        self.graphs: GraphRunner | None = None
        if graph_memory is not None:
            self.graphs = GraphRunner(
                model,
                pool,
                self.caches,
                planner,
                graph_memory,
                agreement or Agreement(),
                max_model_len,
            )
        self.canvases: dict[str, Canvas] = {}
        self.epoch = 0
        self.weight_generation = model.weight_generation  # weights of the next step
        self.ranks = ranks or Ranks()
        self.account = PoolAccount(pool, self.pages, graph_memory, self.ranks)
        self.forward = ForwardPass(model, pool, self.caches, self.ranks)
        self._log = StepLog() if is_reporting else None
        self.usage = self.idle_usage
        self._packing: Packing | None = None  # packing of the latest step
        # Collected steps that are not reported yet, each with the time.perf_counter() of its end.
        self._collected: list[tuple[Step, float]] = []
        self.guests: tuple[StepGuest, ...] = ()

    # ---- one denoising step ----

    def launch(self, req_ids: list[str]) -> Step:
        """Launch one denoising step of the given requests without waiting for a GPU."""
        started = time.perf_counter()
        canvases = [self.canvases[req_id] for req_id in req_ids]
        extra = [guest.extra_items(canvases, self.planner.row_budget) for guest in self.guests]
        batch, plan, planner_us = self.planned([*canvases, *chain.from_iterable(extra)])
        if any(extra) and not all(guest.accepts(batch, plan) for guest in self.guests):
            batch, plan, planner_us = self.planned(canvases)
        self.pool.reset_peak(samples_often=not plan.is_whole(batch.num_rows))
        rows = SampleRows(batch)
        body = None if self.graphs is None else self.graphs.run(batch, plan)
        self.account.make_room(batch.num_rows, plan)
        with nullcontext() if body is not None else self.pool.temporaries():
            sampled = run_to_end(self.chunks(rows, plan, self.host, body))
        memory = self.account.memory(plan, planner_us)
        return Step(started, rows, ops.HostCopy(sampled), memory)

    def chunks(
        self, rows: SampleRows, plan: Plan, host: HostBuffers, body: BodyOutputs | None = None
    ) -> Chunked[torch.Tensor]:
        """Compute a step chunk by chunk with the forward pass that its plan requires."""
        if plan.layout.is_streamed:  # then no graph serves the step
            return run_streamed(self.forward, rows, plan, host)
        return self.forward.run(rows, plan, body)

    def collect(self, step: Step) -> Outcomes:
        """Commit the candidates of a step; skip requests that were removed since its launch."""
        candidates = step.rows.candidates_of(step.samples)
        outcomes: Outcomes = {}
        for item, row_candidates in zip(step.batch.items, candidates, strict=True):
            canvas = self.canvases.get(item.req_id)
            if canvas is item:  # guests commit their extra items
                outcomes[canvas.req_id] = _commit(canvas, row_candidates)
        for guest in self.guests:
            guest.collected(step, candidates, outcomes)
        self._collected.append((step, time.perf_counter()))
        return outcomes

    def report_collected(self) -> None:
        """Log collected steps and publish their memory use.

        Called after the next launch, so that the GPU never waits for it.
        """
        collected, self._collected = self._collected, []
        for step, ended in collected:
            self.usage = step.memory.usage(self.idle_usage)
            if self._log is not None and step_logger.isEnabledFor(logging.INFO):
                self._log.step(step.started, ended, step.batch, self.usage, step.memory.plan)

    def planned(
        self, items: Sequence[BatchItem], longest_chunk_s: float = math.inf
    ) -> tuple[StepBatch, Plan, float]:
        """Build and plan a step; also return the microseconds that planning took."""
        version = self.caches.layout_version
        batch = self.batch_of(items)
        plan, planner_us = self._plan(batch, longest_chunk_s)
        # Planning moved cached keys, so the page table in the batch is stale.
        if self.caches.layout_version != version:
            batch = self.batch_of(items)
        for guest in self.guests:
            guest.launching(batch)
        return batch, plan, planner_us

    def batch_of(self, items: Sequence[BatchItem]) -> StepBatch:
        """Pack the next forwards of these items."""
        shift, pages = self.model.family.logit_shift, self.caches.table
        batch = build_batch(items, shift, pages, self._packing)
        self._packing = batch.packing
        return batch

    def _plan(self, batch: StepBatch, longest_chunk_s: float) -> tuple[Plan, float]:
        """Return the plan of a batch and the microseconds that planning took."""
        started, num_found = time.perf_counter(), self.planner.num_found
        plan = self.account.plan(batch.shape, self.planner, longest_chunk_s)
        if self.planner.num_found > num_found and self._log is not None:
            free_bytes = self.planner.budget_bytes - self.account.kept_bytes
            self._log.plan(batch.num_rows, plan, free_bytes)
        return plan, 1e6 * (time.perf_counter() - started)

    def rehearsals(self) -> Iterator[None]:
        """Yield once for each kind of step that the warm-up must run, set up until the next."""
        yield

    # ---- requests ----

    def start(self, new: NewCanvas) -> None:
        """Start a request, or continue a request on a longer canvas.

        Raises one of `OUT_OF_MEMORY` if there is no memory for its cached keys and values.
        """
        canvas = self.canvases.get(new.req_id)
        if canvas is None:
            canvas = make_canvas(new, self.model.family.visibility)
            canvas.facts |= self.promise
        else:
            canvas.grow(new.params)
        length, layers, owner = canvas.window.num_places, new.host_layers, new.prompt_of or ""
        # `holds` is false for "", that is, without an owner. If an owner has no pages, its request
        # has failed, and this request allocates its own.
        if new.params.cache == "frozen" and self.pages.holds(owner):
            canvas.window.read_prompt(
                self.pages.share(new.req_id, owner, length, canvas.window.frozen_positions)
            )
        # Requests with an exact cache get their pages by `assign`.
        elif new.params.cache not in ("none", "exact"):
            canvas.window.cache = self.pages.allocate(new.req_id, length, layers)
        if layers and self._log is not None:
            self._log.host_layers(new.req_id, self.caches)
        canvas.use_weights(self.weight_generation)
        self.canvases[new.req_id] = canvas
        self.account.count_rules(canvas.params, self.canvases.values())
        for kind in guests_needed(new, self):
            self.join(kind)
        for guest in self.guests:
            guest.started(canvas, new)

    @torch.inference_mode()
    def commit_known_step(self, new: NewCanvas) -> Outcomes:
        """Commit the first step of a started request if a guest has its results already."""
        for guest in self.guests:
            candidates = guest.first_candidates(new)
            if candidates is not None:
                return {new.req_id: _commit(self.canvases[new.req_id], candidates)}
        return {}

    def join(self, kind: type[G]) -> G:
        """Return the guest of this kind, which joins the runner if it has not done so."""
        for guest in self.guests:
            if isinstance(guest, kind):
                return guest
        joined = kind(self)
        self.guests = (*self.guests, joined)
        return joined

    def invalidate(self) -> None:
        """Drop everything that is cached between forwards, except keys and values in pages."""
        for guest in self.guests:
            guest.invalidate()
        self._packing = None

    def assign(self, new_pages: Mapping[str, NewPages]) -> None:
        """Give requests the pages that the scheduler has assigned to them."""
        for req_id, new in new_pages.items():
            canvas = self.canvases.get(req_id)
            if canvas is None:
                continue  # its start failed
            for guest in self.guests:
                guest.pages_changed(req_id, are_replaced=new.num_kept is not None)
            cache = self.pages.assign(
                req_id, new.page_ids, behind=new.num_kept is None, window_pages=new.window_ids
            )
            canvas.assign(cache, new.num_kept)
        if new_pages:
            self.pages.update_table()

    def release_pages(self, req_id: str) -> None:
        """Release the pages of a request that waits until it can start again."""
        for guest in self.guests:
            guest.pages_changed(req_id, are_replaced=True)
        self.pages.release(req_id)
        self._packing = None

    def remove(self, req_id: str) -> None:
        for guest in self.guests:
            guest.removed(req_id)
        canvas = self.canvases.pop(req_id, None)
        if canvas is not None:
            self.account.count_rules(canvas.params, self.canvases.values())
        self.pages.release(req_id)
        self._packing = None

    # ---- memory ----

    @property
    def budget_bytes(self) -> int:
        """Bytes available to steps and to cached keys and values together."""
        return self.planner.budget_bytes - self.account.fixed_bytes

    def runs_whole(self, num_rows: int) -> bool:
        """Whether a step of `num_rows` rows would run without chunks in the free memory."""
        return self.planner.runs_whole(num_rows, self.account.kept_bytes)

    def release_memory(self, *, even_work: bool) -> bool:
        """Release memory of guests, as `StepGuest.release_memory`."""
        are_released = [guest.release_memory(even_work=even_work) for guest in self.guests]
        return any(are_released)

    @property
    def idle_usage(self) -> StepUsage:
        """Memory report without a step."""
        caches = self.caches
        cache_bytes = (caches.num_bytes, caches.host_bytes) if caches.num_pages else (0, 0)
        return StepUsage(self.budget_bytes, self.planner.rates, *cache_bytes)


def _commit(canvas: Canvas, result: Candidates | BatchedCommit) -> Exception | None:
    """Commit the candidates of a request; return the error that ends this request alone, if any."""
    if isinstance(result, Candidates) and result.scores.size and np.isnan(result.scores).all():
        return BrokenLogitsError()
    return canvas.failure_of(canvas.commit, result)

# SPDX-License-Identifier: Apache-2.0
"""Accounts for memory of steps: how much a step may use, and how much it used."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.engine.planning import rule_memory
from vllm.diffusion.memory import RuleMemory

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.diffusion import ops
    from vllm.diffusion.engine.messages import StepUsage
    from vllm.diffusion.engine.worker.batch import StepBatch
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.sample_rows import SampleRows
    from vllm.diffusion.memory import (
        ActivationPool,
        GraphMemory,
        PageAllocator,
        Plan,
        Planner,
        StepShape,
    )
    from vllm.diffusion.parallel.groups import Ranks
    from vllm.diffusion.request.params import DiffusionParams

# Unused reserved pages are released if a step in chunks then takes at most this share of its time.
WORTH_TRIMMING = 0.95
# Rows of a step. Memory that PyTorch keeps after a shorter step is not worth a wait.
SHORT_ROWS = 4_096


class StepMemory(NamedTuple):
    """Memory that a step uses, measured by the host at launch."""

    plan: Plan
    planner_us: float
    peak_bytes: int

    def usage(self, idle: StepUsage) -> StepUsage:
        """Return the memory report of a finished step; `idle` supplies all other fields.

        The average is the measured peak times the ratio of average to peak in the plan.
        """
        predicted = self.plan.predicted_average_bytes / max(self.plan.predicted_peak_bytes, 1)
        return replace(
            idle,
            peak_bytes=self.peak_bytes,
            average_bytes=round(self.peak_bytes * predicted),
            planner_us=self.planner_us,
        )


class Step(NamedTuple):
    """A launched step, to be collected and committed.

    Attributes:
        started: time.perf_counter() before the launch.
        rows: sample rows of the step.
        samples: table of their samples.
        memory: memory that the step uses.
    """

    started: float
    rows: SampleRows
    samples: ops.HostCopy
    memory: StepMemory

    @property
    def batch(self) -> StepBatch:
        return self.rows.batch

    @property
    def req_ids(self) -> list[str]:
        return list(dict.fromkeys([canvas.req_id for canvas in self.batch.items]))


class PoolAccount:
    """Account of the bytes of the pool that are not available to a step, used to plan it.

    Args:
        pool: memory of steps and of cached data.
        pages: pages of cached keys and values, in the pool.
        graphs: memory of captured graphs; None without graphs.
        ranks: ranks that compute the same steps.

    Attributes:
        rule_bytes: memory outside of the pool that the rules of running requests take.
    """

    rule_bytes = 0

    def __init__(
        self,
        pool: ActivationPool,
        pages: PageAllocator,
        graphs: GraphMemory | None,
        ranks: Ranks,
    ) -> None:
        self._pool, self._pages, self._graphs, self._ranks = pool, pages, graphs, ranks
        self._last_sizes: tuple[object, ...] = ()
        self._most_rows = SHORT_ROWS

    @property
    def fixed_bytes(self) -> int:
        """Bytes that are never released: graphs, and the buffers that they write to."""
        graphs = 0 if self._graphs is None else self._graphs.used_bytes
        return graphs + self._pool.outermost_bytes

    @property
    def unseen_bytes(self) -> int:
        """Part of `fixed_bytes` that the pool does not count itself."""
        if self._graphs is None or self._pool.graph_bytes is not None:
            return 0
        return self._graphs.used_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that outlive a step, or that a paused step holds until its next slice."""
        kept_bytes = self.fixed_bytes + self._pages.store.reserved_bytes + self._pool.frame_bytes
        return kept_bytes + self.rule_bytes

    def count_rules(self, changed: DiffusionParams, running: Iterable[Canvas]) -> None:
        """Count the memory of all rules, if the rule of a request that came or went takes any."""
        if any(rule_memory(changed)):
            self.rule_bytes = RuleMemory.of_all(rule_memory(c.params) for c in running)

    def memory(self, plan: Plan, planner_us: float, peak_bytes: int | None = None) -> StepMemory:
        """Return the memory of a step; `peak_bytes` defaults to the current peak of the pool."""
        peak = self._pool.peak_bytes if peak_bytes is None else peak_bytes
        return StepMemory(plan, planner_us, self.unseen_bytes + peak)

    def plan(self, shape: StepShape, planner: Planner, longest_chunk_s: float) -> Plan:
        """Return the plan of a step in the memory that is not occupied by cached data.

        If no plan fits, or if a step in chunks would become clearly faster, the caches release
        unused pages. Later requests with a cache then reserve these pages again, and their graphs
        are captured again.

        Raises:
            ActivationBudgetError: the step does not fit.
        """
        try:
            plan = planner.plan_alike(shape, self._kept_by_all(shape, planner), longest_chunk_s)
            if plan.is_whole(shape.rows) or not self._gains(shape, planner, plan, longest_chunk_s):
                return plan
        except ActivationBudgetError:
            pass
        self._pages.trim()
        return planner.plan_alike(shape, self._kept_by_all(shape, planner), longest_chunk_s)

    def _kept_by_all(self, shape: StepShape, planner: Planner) -> int:
        """Return the bytes of the pool that the step cannot use; if ranks share it, the maximum."""
        kept_bytes, ranks = self.kept_bytes, self._ranks.sequence
        if ranks.size > 1 and planner.search.divides(shape):
            return -ranks.all_reduce_min(-kept_bytes)
        return kept_bytes

    def _gains(
        self, shape: StepShape, planner: Planner, plan: Plan, longest_chunk_s: float
    ) -> bool:
        """Whether the step would become clearly faster if unused pages were released."""
        unused = self._pages.unused_bytes
        if not unused or self._pool.has_frame:
            return False
        roomy = planner.plan(shape, self.kept_bytes - unused, longest_chunk_s)
        return roomy.predicted_seconds < WORTH_TRIMMING * plan.predicted_seconds

    def make_room(self, num_rows: int, plan: Plan) -> None:
        """Release memory of other sizes before a long step: buffers and PyTorch's temporaries.

        Before a whole step that is longer than all earlier ones, release only PyTorch's
        temporaries; otherwise PyTorch would allocate more in addition to its cache. Must not be
        called within the pool's `temporaries`, whose memory stays until their end.
        """
        if plan.is_whole(num_rows):
            if num_rows > self._most_rows:
                self._pool.drop_unused()
                self._most_rows = num_rows
        elif plan.sizes != self._last_sizes:
            self._pool.trim()
            self._last_sizes, self._most_rows = plan.sizes, SHORT_ROWS

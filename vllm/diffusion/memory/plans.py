# SPDX-License-Identifier: Apache-2.0
"""Plans: how the rows of a step are cut into chunks, so that it stays within a budget of bytes.

A plan is found when a step of its shape first comes: nothing is measured or stored beforehand. A
step that fits as a whole runs as a whole. Otherwise every way to keep its rows (`Residency`) is
tried; each stage takes the longest chunks that fit beside what is resident, and of the plans that
fit the one with the least predicted time is taken. Nothing here computes with torch, or imports
upstream.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cached_property, partial
from typing import TYPE_CHECKING

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.memory.cost import H200, Costs
from vllm.diffusion.memory.drafts import (
    MIN_CHUNK_ROWS,
    WHOLE_STEP_ROWS,
    PlanCandidate,
    RowBytes,
)
from vllm.diffusion.memory.footprint import Footprint, Residency, StepShape
from vllm.diffusion.memory.plan import ChunkRows, Plan, StageSeconds

if TYPE_CHECKING:
    from vllm.diffusion.memory.cost import Rates
    from vllm.diffusion.memory.footprint import ModelShape

LOGITS_CHUNK_BYTES = 256 << 20  # more rows at a time would not be faster
MAX_KNOWN_PLANS = 4_096
# Steps share a plan if these sizes round up to equal multiples of a unit: sample rows,
READ_UNITS = 16  # of a unit of 1 / READ_UNITS of the step's rows,
LEAST_READ_UNIT = 32  # but at least this;
KEYS_UNIT = 256  # keys of the longest sequence, and kept keys;
SEQUENCES_UNIT = 16  # sequences, if there are several.
WORTH_DIVIDING = 0.8  # of one rank's time: several ranks must take less
MOST_MIN_ROWS = 65_536  # rows that are divided in any case


def planned_as(step: StepShape) -> StepShape:
    """Return the largest of the steps that share one plan with this one."""
    is_alone = step.num_sequences == 1
    unit = max(step.rows // READ_UNITS, LEAST_READ_UNIT)
    return step._replace(
        sample_rows=min(_in_whole(unit, step.sample_rows), step.rows),
        longest=_in_whole(KEYS_UNIT, step.longest),
        num_sequences=1 if is_alone else _in_whole(SEQUENCES_UNIT, step.num_sequences),
        kept_keys=_in_whole(KEYS_UNIT, step.kept_keys),
    )


def _in_whole(unit: int, count: int) -> int:
    return -(-count // unit) * unit


class Plans:
    """Plans of the steps of one model under a budget.

    Args:
        shape: the model's sizes on one rank.
        budget_bytes: bytes of the activation pool, for buffers of a step, kept keys and values,
            graphs.
        row_budget: rows that several requests may share in one step.
        uses_host: whether the residual stream may lie in host memory if nothing else fits as well.
        host_bytes: bytes of host memory for keys and values that the device has no room for.
        is_split: whether memory of PyTorch's temporaries in one stage cannot serve another stage's
            buffers before the step ends, as in a pool on virtual memory.
        rates: rates of the device.
        shards: sequence-parallel ranks, which may divide the rows of a step.
        min_rows: rows from which they divide a step; None for where that pays.

    Attributes:
        num_found: number of plans computed, not looked up.
    """

    def __init__(
        self,
        shape: ModelShape,
        budget_bytes: int,
        row_budget: int,
        *,
        uses_host: bool = True,
        host_bytes: int = 0,
        is_split: bool = False,
        rates: Rates = H200,
        shards: int = 1,
        min_rows: int | None = None,
    ) -> None:
        self.shape = shape
        self.budget_bytes, self.host_bytes = budget_bytes, host_bytes
        self.row_budget = row_budget
        self._is_split = is_split
        self._footprint = Footprint(shape)
        self.rates, self._costs = rates, Costs(shape, rates)
        self._most_read = max(LOGITS_CHUNK_BYTES // (shape.num_columns * shape.element_bytes), 1)
        self._shards, self._min_rows = shards, min_rows
        # Ways to run with chunks, from the one that computes least to the one that takes least:
        # by how many ranks divide the rows.
        self._layouts = {
            count: [
                Residency(False, groups, host_residual, count)
                for host_residual in ((False, True) if uses_host else (False,))
                for groups in shape.head_groups
                if shape.num_kv_heads // groups % count == 0
            ]
            for count in {1, shards}
        }
        self._row_bytes: dict[tuple[Residency, bool], RowBytes] = {}
        self._known: dict[tuple[StepShape, int, float], Plan] = {}
        self.num_found = 0

    def plan(self, step: StepShape, kept_bytes: int = 0, longest_chunk_s: float = math.inf) -> Plan:
        """Return the plan of a step.

        Args:
            step: its sizes.
            kept_bytes: bytes of the budget taken by what outlives the step.
            longest_chunk_s: most predicted seconds of a chunk, where `MIN_CHUNK_ROWS` take less; a
                step can be paused between chunks only.

        Raises:
            ActivationBudgetError: no plan fits.
        """
        key = (step, kept_bytes, longest_chunk_s)
        plan = self._known.get(key)
        if plan is None:
            if len(self._known) >= MAX_KNOWN_PLANS:
                self._known.clear()
            plan = self._known[key] = self._find(*key)
            self.num_found += 1
        return plan

    def plan_alike(
        self, step: StepShape, kept_bytes: int = 0, longest_chunk_s: float = math.inf
    ) -> Plan:
        """Plan of the step rounded up if that needs no chunks, else of the exact step.

        Steps are rounded up by `planned_as`, which keeps the search off the hot path: as tokens are
        committed, every step reads fewer rows than the one before, and sequences become longer;
        finding a plan takes the host as long as a hundred look-ups. Arguments and errors are those
        of `plan`.
        """
        try:
            plan = self.plan(planned_as(step), kept_bytes, longest_chunk_s)
        except ActivationBudgetError:
            return self.plan(step, kept_bytes, longest_chunk_s)
        return plan if plan.is_whole(step.rows) else self.plan(step, kept_bytes, longest_chunk_s)

    def runs_whole(self, num_rows: int, kept_bytes: int = 0) -> bool:
        """Whether a step of `num_rows` rows, whatever is sampled, needs no chunks."""
        step = StepShape(num_rows, num_rows, num_rows)
        try:
            return self.plan(step, kept_bytes).is_whole(num_rows)
        except ActivationBudgetError:
            return False

    def divides(self, step: StepShape) -> bool:
        """Whether ranks divide the rows of a step; a step that keeps is computed by every rank."""
        return self._shards > 1 and step.rows >= self.min_rows and not step.keeps

    @cached_property
    def min_rows(self) -> int:
        """Rows of a step from which ranks divide it: as set, else where that saves a fifth."""
        if self._min_rows is not None:
            return self._min_rows
        rows = MIN_CHUNK_ROWS
        while rows < MOST_MIN_ROWS and not self._gains_by_dividing(StepShape(rows, 1, rows)):
            rows *= 2
        return rows

    def _gains_by_dividing(self, step: StepShape) -> bool:
        share, layout = step.share(self._shards), self._layouts[self._shards][0]
        alone = self._costs.step(step, Residency(keep_queries=True), ChunkRows.equal(step.rows))
        divided = self._costs.step(share, layout, ChunkRows.equal(share.rows))
        return sum(divided) < WORTH_DIVIDING * sum(alone)

    def _as_computed(self, step: StepShape) -> tuple[StepShape, list[Residency]]:
        """Return the part of a step that one rank computes, and the layouts to try."""
        if self.divides(step):
            return step.share(self._shards), self._layouts[self._shards]
        return step, self._layouts[1]

    def _find(self, step: StepShape, kept_bytes: int, longest_chunk_s: float) -> Plan:
        available = self.budget_bytes - kept_bytes
        asked, is_divided = step, self.divides(step)
        step, layouts = self._as_computed(step)
        whole = self._draft(Residency(keep_queries=True), step, longest_chunk_s)
        may_be_whole = step.rows <= WHOLE_STEP_ROWS and not is_divided
        if may_be_whole and whole.whole_bytes <= available:
            return self._finish(whole, whole.sizes(available), kept_bytes)
        drafts = [whole] if may_be_whole else []
        drafts += [self._draft(layout, step, longest_chunk_s) for layout in layouts]
        fitting = [draft for draft in drafts if draft.smallest_bytes <= available]
        if not fitting:
            raise self._refusal(asked, kept_bytes, min(d.smallest_bytes for d in drafts))
        plans = (
            self._finish(draft, sizes, kept_bytes)
            for draft in fitting
            for sizes in draft.ways_to_cut(available)
        )
        return min(plans, key=lambda plan: plan.predicted_seconds)

    def _draft(
        self, layout: Residency, step: StepShape, longest_chunk_s: float = math.inf
    ) -> PlanCandidate:
        key = (layout, step.num_sequences > 1)
        row_bytes = self._row_bytes.get(key)
        if row_bytes is None:
            row_bytes = RowBytes.of(self._footprint, *key, is_split=self._is_split)
            self._row_bytes[key] = row_bytes
        longest = self._longest_chunks(layout, step, longest_chunk_s)
        attend_chunk = partial(self._costs.attend_chunk, groups=layout.head_groups)
        return PlanCandidate(layout, step, row_bytes, self._most_read, longest, attend_chunk)

    def _longest_chunks(self, layout: Residency, step: StepShape, seconds: float) -> ChunkRows:
        """Return the most rows of a chunk of every stage that take at most `seconds`."""
        if seconds == math.inf:
            return ChunkRows.equal(step.rows)

        def seconds_of(rows: int) -> StageSeconds:
            return self._costs.longest_chunks(step, layout, ChunkRows.equal(rows))

        least = min(MIN_CHUNK_ROWS, step.rows)
        counts = range(least + 1, step.rows + 1)
        return ChunkRows(
            *(
                least + bisect_right(counts, seconds, key=lambda rows: seconds_of(rows)[stage])
                for stage in range(len(ChunkRows._fields))
            )
        )

    def _finish(self, draft: PlanCandidate, sizes: ChunkRows, kept_bytes: int) -> Plan:
        """Make the plan of chosen chunks, with its predicted costs."""
        peaks = draft.peaks(sizes)
        times = self._costs.step(draft.step, draft.layout, sizes)
        seconds = sum(times)
        weighted = sum(peak * time for peak, time in zip(peaks, times, strict=True))
        return Plan(
            draft.layout,
            sizes,
            predicted_peak_bytes=kept_bytes + max(peaks),
            predicted_average_bytes=kept_bytes + int(weighted / seconds),
            predicted_seconds=seconds,
            chunk_seconds=self._costs.longest_chunks(draft.step, draft.layout, sizes),
        )

    def _refusal(self, step: StepShape, kept_bytes: int, required: int) -> ActivationBudgetError:
        available = self.budget_bytes - kept_bytes

        def smallest(rows: int) -> int:
            return self._smallest_bytes(step.scaled(rows))

        fits = bisect_right(range(1, step.rows), available, key=smallest)
        longest = step.scaled(fits).longest
        return ActivationBudgetError(
            step.longest, required + kept_bytes, self.budget_bytes, longest
        )

    def _smallest_bytes(self, step: StepShape, chunk_rows: int = MIN_CHUNK_ROWS) -> int:
        """Fewest bytes of the step in any layout, with chunks of `chunk_rows` rows if possible."""
        step, layouts = self._as_computed(step)
        return min(self._draft(layout, step).bytes_with(chunk_rows) for layout in layouts)

# SPDX-License-Identifier: Apache-2.0
"""Search of a plan: how the rows of a step are cut into chunks to stay within a budget of bytes.

A step that fits as a whole runs as a whole. Otherwise every way to keep its rows (`Residency`) is
tried; each stage takes the longest chunks that fit beside what is resident, and of the plans that
fit the one with the least predicted time is taken. Nothing here computes with torch, or imports
upstream.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.memory.cost import Costs
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
WORTH_DIVIDING = 0.8  # of one rank's time: several ranks must take less
MOST_MIN_ROWS = 65_536  # rows that are divided in any case


class PlanSearch:
    """Finds plans of the steps of one model under a budget; `Planner` documents the arguments."""

    def __init__(
        self,
        shape: ModelShape,
        budget_bytes: int,
        rates: Rates,
        *,
        uses_host: bool,
        is_split: bool,
        shards: int,
        min_rows: int | None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._costs = Costs(shape, rates)
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
        self._bytes_of_row = cache(partial(RowBytes.of, Footprint(shape), is_split=is_split))

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

    def find(self, step: StepShape, kept_bytes: int, longest_chunk_s: float) -> Plan:
        """Search the plan of a step, for some hundred microseconds; see `Planner.plan`."""
        available = self._budget_bytes - kept_bytes
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
        row_bytes = self._bytes_of_row(layout, step.num_sequences > 1)
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
        available = self._budget_bytes - kept_bytes

        def smallest(rows: int) -> int:
            return self.smallest_bytes(step.scaled(rows))

        fits = bisect_right(range(1, step.rows), available, key=smallest)
        longest = step.scaled(fits).longest
        return ActivationBudgetError(
            step.longest, required + kept_bytes, self._budget_bytes, longest
        )

    def smallest_bytes(self, step: StepShape, chunk_rows: int = MIN_CHUNK_ROWS) -> int:
        """Fewest bytes of the step in any layout, with chunks of `chunk_rows` rows if possible."""
        step, layouts = self._as_computed(step)
        return min(self._draft(layout, step).bytes_with(chunk_rows) for layout in layouts)

    def whole_bytes(self, step: StepShape) -> int:
        """Bytes of the step without chunks."""
        return self._draft(Residency(keep_queries=True), step).whole_bytes

# SPDX-License-Identifier: Apache-2.0
"""Search for a plan: cuts the rows of a step into chunks to stay within a budget of bytes.

If a step fits as a whole, it runs as a whole. Otherwise the search tries every way to keep its rows
(`Residency`). Each stage uses the longest chunks that fit next to the resident data. The search
returns the plan with the shortest predicted time. This module does not compute with torch and does
not import upstream.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.stages import row_bytes
from vllm.diffusion.memory.cost import TILE_ROWS, Costs, even_chunk
from vllm.diffusion.memory.footprint import ROUNDING_BYTES, Footprint, RowBytes
from vllm.diffusion.memory.plan import ChunkRows, Plan, Residency, StageSeconds
from vllm.diffusion.memory.shapes import StepShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.memory.cost import Rates
    from vllm.diffusion.memory.shapes import ModelShape

MIN_CHUNK_ROWS = 16
# Steps of up to `WHOLE_STEP_ROWS` rows run as a whole if they fit. In larger steps, chunks of more
# than `FULL_SPEED_ROWS` rows would not make the row-wise stages faster, so these stages use no more
# memory than attention.
WHOLE_STEP_ROWS = 16_384
FULL_SPEED_ROWS = 4_096
# Larger chunks of rows would not be faster. Copies of the logits may take double the bytes.
LOGITS_CHUNK_BYTES = 256 << 20
WORTH_DIVIDING = 0.8  # ranks divide rows if the step then takes less than this share of the time
MAX_MIN_ROWS = 65_536  # ranks always divide more rows than this


class PlanCandidate:
    """A way to keep a step's rows, with its chunks not chosen yet.

    Args:
        layout: the way to keep the rows.
        step: the step.
        row_bytes: bytes of a row in this layout.
        max_logits_rows: maximum rows with logits at a time.
        longest: maximum rows of a chunk of every stage, regardless of memory.
        attend_chunk: function of the rows that attend and of the maximum rows of a chunk; returns
            the rows of a chunk.
        unit: chunks of the feed-forward stage have a multiple of this many rows.
    """

    def __init__(
        self,
        layout: Residency,
        step: StepShape,
        row_bytes: RowBytes,
        max_logits_rows: int,
        longest: ChunkRows,
        attend_chunk: Callable[[int, int], int],
        unit: int = 1,
    ) -> None:
        self._unit = unit
        self.layout, self.step, self._stages = layout, step, row_bytes.stages
        self._resident = row_bytes.resident * step.rows + row_bytes.results * step.sample_rows
        self._resident += row_bytes.collected * step.kept_keys + row_bytes.split + ROUNDING_BYTES
        # The results of attention stay in memory with the logits.
        if step.rows <= WHOLE_STEP_ROWS:
            logits = self._stages.logits
            of_logits = max(logits.buffers, logits.temporaries)
            beside = step.rows * self._stages.attend.temporaries // of_logits
            max_logits_rows = max(max_logits_rows - beside, min(max_logits_rows, TILE_ROWS))
        max_logits_rows = min(step.sample_rows, max_logits_rows, longest.logits)
        self._longest, self._attend_chunk = longest._replace(logits=max_logits_rows), attend_chunk

    def bytes_with(self, chunk_rows: int) -> int:
        """Return the step's bytes with chunks of `chunk_rows` rows, or of the minimum if larger."""
        max_rows = max(chunk_rows, MIN_CHUNK_ROWS, self._unit)
        return max(self.peaks(ChunkRows(*(min(rows, max_rows) for rows in self._longest))))

    @property
    def attend_parts(self) -> tuple[int, ...]:
        """Divisors of attention's longest chunks to try.

        In a split pool, the longest chunks may leave the other stages too few buffers or
        temporaries.
        """
        return (1, 2, 4) if self._stages.attend.temporaries else (1,)

    def sizes(self, available: int, attend_part: int = 1) -> ChunkRows:
        """Return the longest chunks that fit into `available` bytes; attention comes first.

        The other stages use the buffers and temporaries that attention leaves.

        Args:
            available: number of bytes.
            attend_part: divisor of the rows that attention could use.
        """
        rows, of_row, free = self.step.rows, self._stages, available - self._resident
        longest = self._longest
        fitting = free // (attend_part * sum(of_row.attend))
        attend = self._attend_chunk(rows, max(min(fitting, longest.attend), 1))
        attending = attend * of_row.attend.buffers
        temporaries = attend * of_row.attend.temporaries
        enough_rows = rows if rows <= WHOLE_STEP_ROWS else FULL_SPEED_ROWS
        of_others = max(of_row.keys_values.temporaries, of_row.feed_forward.temporaries)
        of_logits = longest.logits * of_row.logits.temporaries
        temporaries = max(temporaries, enough_rows * of_others, of_logits)
        temporaries = min(temporaries, free - attending)
        buffers = free - temporaries
        if rows > WHOLE_STEP_ROWS:
            enough = of_row.feed_forward.buffers_in(FULL_SPEED_ROWS)
            buffers = min(buffers, max(attending, enough))
        fitting = of_row.feed_forward.rows_in(buffers, temporaries)
        feed_forward = even_chunk(rows, min(fitting, longest.feed_forward))
        if feed_forward < rows:
            feed_forward = max(feed_forward // self._unit, 1) * self._unit
        fitting = of_row.keys_values.rows_in(buffers, temporaries)
        max_logits_rows = max(min(longest.logits, attend, feed_forward), 1)
        return ChunkRows(
            even_chunk(rows, min(fitting, longest.keys_values)),
            attend,
            feed_forward,
            even_chunk(max_logits_rows, of_row.logits.rows_in(buffers, temporaries)),
        )

    def peaks(self, sizes: ChunkRows) -> list[int]:
        """Return the bytes in use during each stage, including resident data."""
        rows = ChunkRows.equal(self.step.rows)._replace(logits=self.step.sample_rows)
        stages = list(zip(map(min, sizes, rows), self._stages, strict=True))
        fixed = self._resident + max(count * stage.temporaries for count, stage in stages)
        return [fixed + stage.buffers_in(count) for count, stage in stages]


class PlanSearch:
    """Finds plans for the steps of one model under a budget; `Planner` documents the arguments."""

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
        logits_bytes = shape.num_columns * shape.element_bytes
        all_bytes = max(3 * logits_bytes, logits_bytes + row_bytes(shape.head))
        self._max_logits_rows = max(3 * LOGITS_CHUNK_BYTES // all_bytes, 1)
        self._shards, self._min_rows, self._unit = shards, min_rows, shape.row_unit
        # Layouts for steps with chunks, by the number of ranks that divide the rows: from the
        # layout with the least computation to the layout with the least memory.
        self._layouts = {
            count: [
                Residency(False, groups, host_residual, count)
                for host_residual in ((False, True) if uses_host else (False,))
                for groups in shape.head_groups
                if shape.num_kv_heads // groups % count == 0
            ]
            for count in {1, shards}
        }
        self._footprints = {
            adapts: Footprint(shape.for_step(adapts=adapts)) for adapts in (False, True)
        }
        self._bytes_of_row = cache(partial(RowBytes.of, is_split=is_split))

    def divides(self, step: StepShape) -> bool:
        """Whether ranks divide the rows of a step; every rank computes a step with a cache."""
        return self._shards > 1 and step.rows >= self.min_rows and not step.keeps

    @cached_property
    def min_rows(self) -> int:
        """Minimum rows of a step that ranks divide: as configured, or if this saves a fifth."""
        if self._min_rows is not None:
            return self._min_rows
        rows = MIN_CHUNK_ROWS
        while rows < MAX_MIN_ROWS and not self._gains_by_dividing(StepShape(rows, 1, rows)):
            rows *= 2
        return rows

    def _gains_by_dividing(self, step: StepShape) -> bool:
        share, layout = step.share(self._shards), self._layouts[self._shards][0]
        alone = self._costs.step(step, Residency(keep_queries=True), ChunkRows.equal(step.rows))
        divided = self._costs.step(share, layout, ChunkRows.equal(share.rows))
        return sum(divided) < WORTH_DIVIDING * sum(alone)

    def _as_computed(self, step: StepShape) -> tuple[StepShape, list[Residency]]:
        """Return the part of a step that one rank computes, and the layouts to try."""
        part, count = step, 1
        if self.divides(step):
            part, count = step.share(self._shards), self._shards
        if step.fp8_attention:
            return part, [layout._replace(fp8_attention=True) for layout in self._layouts[count]]
        return part, self._layouts[count]

    def find(self, step: StepShape, kept_bytes: int, longest_chunk_s: float) -> Plan:
        """Search for the plan of a step, in some hundred microseconds; see `Planner.plan`."""
        available, whole_step = self._budget_bytes - kept_bytes, step
        step, layouts = self._as_computed(step)
        candidates: list[PlanCandidate] = []
        if step.rows <= WHOLE_STEP_ROWS and step is whole_step and not step.fp8_attention:
            whole = self._candidate(Residency(keep_queries=True), step, longest_chunk_s)
            if whole.bytes_with(step.rows) <= available:
                return self._plan_with(whole, whole.sizes(available), kept_bytes)
            candidates.append(whole)
        candidates += [self._candidate(layout, step, longest_chunk_s) for layout in layouts]
        smallest = {candidate: candidate.bytes_with(MIN_CHUNK_ROWS) for candidate in candidates}
        plans = [
            self._plan_with(candidate, candidate.sizes(available, part), kept_bytes)
            for candidate, required in smallest.items()
            if required <= available
            for part in candidate.attend_parts
        ]
        if not plans:
            raise self._refusal(whole_step, kept_bytes, min(smallest.values()))
        return min(plans, key=lambda plan: plan.predicted_seconds)

    def _candidate(
        self, layout: Residency, step: StepShape, longest_chunk_s: float = math.inf
    ) -> PlanCandidate:
        footprint = self._footprints[step.adapts]
        row_bytes = self._bytes_of_row(footprint, layout, step.num_sequences > 1)
        longest = self._longest_chunks(layout, step, longest_chunk_s)
        attend_chunk = partial(self._costs.attend_chunk, groups=layout.head_groups)
        max_rows = self._max_logits_rows
        return PlanCandidate(layout, step, row_bytes, max_rows, longest, attend_chunk, self._unit)

    def _longest_chunks(self, layout: Residency, step: StepShape, seconds: float) -> ChunkRows:
        """Return the maximum rows of a chunk of every stage that take at most `seconds`."""
        if seconds == math.inf:
            return ChunkRows.equal(step.rows)

        def seconds_of(rows: int) -> StageSeconds:
            return self._costs.longest_chunks(step, layout, ChunkRows.equal(rows))

        min_rows = min(max(MIN_CHUNK_ROWS, self._unit), step.rows)
        counts = range(min_rows + 1, step.rows + 1)
        return ChunkRows(
            *(
                min_rows + bisect_right(counts, seconds, key=lambda rows: seconds_of(rows)[stage])
                for stage in range(len(ChunkRows._fields))
            )
        )

    def _plan_with(self, candidate: PlanCandidate, sizes: ChunkRows, kept_bytes: int) -> Plan:
        """Create the plan for chosen chunks, with its predicted costs."""
        peaks = candidate.peaks(sizes)
        times = self._costs.step(candidate.step, candidate.layout, sizes)
        seconds = sum(times)
        weighted = sum(peak * time for peak, time in zip(peaks, times, strict=True))
        return Plan(
            candidate.layout,
            sizes,
            predicted_peak_bytes=kept_bytes + max(peaks),
            predicted_average_bytes=kept_bytes + int(weighted / seconds),
            predicted_seconds=seconds,
            chunk_seconds=self._costs.longest_chunks(candidate.step, candidate.layout, sizes),
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
        """Return the minimum bytes of the step in any layout, with chunks of `chunk_rows` rows."""
        step, layouts = self._as_computed(step)
        return min(self._candidate(layout, step).bytes_with(chunk_rows) for layout in layouts)

    def whole_bytes(self, step: StepShape) -> int:
        """Return the bytes of the step without chunks."""
        return self._candidate(Residency(keep_queries=True), step).bytes_with(step.rows)

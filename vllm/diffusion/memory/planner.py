# SPDX-License-Identifier: Apache-2.0
"""How the rows of a step are cut into chunks, so that the step stays within a budget of bytes.

A plan is found when a step of its shape first comes: nothing is measured or stored beforehand. A
step that fits as a whole runs as a whole. Else every way to keep its rows (`Layout`) is tried; each
stage takes the longest chunks that fit beside what is resident, and of the plans that fit the one
with the least predicted time is taken. Nothing here imports torch or upstream.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.errors import ActivationBudgetError
from vllm.diffusion.memory.cost import H200, Costs, Work
from vllm.diffusion.memory.footprint import (
    ROUNDING_BYTES,
    Footprint,
    Layout,
    StepShape,
    buffered,
    device_layers,
    is_streamed,
    temporary,
    total,
)
from vllm.diffusion.pages import PAGE_SIZE, in_whole_pages

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from vllm.diffusion.memory.cost import Rates
    from vllm.diffusion.memory.footprint import ModelShape, Phases

MIN_CHUNK_ROWS = 16
TILE_ROWS = 128  # chunks are whole tiles of a product where they can be
LOGITS_CHUNK_BYTES = 256 << 20  # more rows at a time would not be faster
# Up to here a step that fits runs as a whole. Beyond, the row-wise stages gain nothing from longer
# chunks than `FULL_SPEED_ROWS`, so they take no more memory than attention does.
WHOLE_STEP_ROWS = 16_384
FULL_SPEED_ROWS = 4_096
FEW_CHUNKS = 64  # of a stage: a step in so many is hardly slower than in few
ATTEND_PARTS = (1, 2, 4)  # of its longest chunks that are tried
MAX_KNOWN_PLANS = 4_096
WORTH_DIVIDING = 0.8  # of the time of one rank, as which several take no more
MOST_MIN_ROWS = 65_536  # rows that are divided in any case
RESERVED_PART = 8  # of the budget one part in so many is left to short steps, at most


class StageSeconds(NamedTuple):
    """Predicted seconds of every stage; of the stages of a layer, of one layer or a part of it."""

    keys_values: float = 0.0
    attend: float = 0.0
    feed_forward: float = 0.0
    read: float = 0.0


_NO_SECONDS = StageSeconds()


@dataclass(frozen=True)
class Plan:
    """Rows per chunk of every stage of one step, and what stays on the device.

    Attributes:
        keep_queries: queries are computed together with keys and values and kept for the step.
        keys_values_rows, attend_rows, feed_forward_rows: chunk sizes, in rows.
        logits_rows: rows that are read after the last layer at a time.
        head_groups: keys and values of one of so many groups of heads exist at a time.
        host_residual: the residual stream lies in host memory.
        predicted_peak_bytes: of the device, with what requests keep between steps.
        predicted_average_bytes: weighted by predicted time.
        predicted_seconds: of the step.
        chunk_seconds: of one chunk of every stage.
        shards: ranks that divide the rows; chunks are those of a rank, and so is all else.
    """

    keep_queries: bool
    keys_values_rows: int
    attend_rows: int
    feed_forward_rows: int
    logits_rows: int
    head_groups: int = 1
    host_residual: bool = False
    predicted_peak_bytes: int = 0
    predicted_average_bytes: int = 0
    predicted_seconds: float = 0.0
    chunk_seconds: StageSeconds = _NO_SECONDS
    shards: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the sizes of a layer's buffers follow from, besides the rows of the step."""
        rows = (self.keys_values_rows, self.attend_rows, self.feed_forward_rows)
        return (*rows, self.head_groups, self.host_residual, self.keep_queries, self.shards)

    @property
    def is_streamed(self) -> bool:
        """Layers run by groups of heads, on rows that come from the host, or over ranks."""
        return is_streamed(self._layout)

    @property
    def _layout(self) -> Layout:
        return Layout(self.keep_queries, self.head_groups, self.host_residual, self.shards)

    def is_whole(self, num_rows: int) -> bool:
        """Whether every stage of a layer takes `num_rows` rows as one chunk."""
        sizes = (self.keys_values_rows, self.attend_rows, self.feed_forward_rows)
        return self.keep_queries and min(sizes) >= num_rows

    def resized(self, num_rows: int) -> Plan:
        """The same plan for a whole step of `num_rows` rows."""
        return replace(
            self, keys_values_rows=num_rows, attend_rows=num_rows, feed_forward_rows=num_rows
        )

    def __str__(self) -> str:
        """The plan in words and numbers, on one line."""
        rows = (
            f"{name} {size}"
            for name, size in (
                ("keys-values", self.keys_values_rows),
                ("attend", self.attend_rows),
                ("feed-forward", self.feed_forward_rows),
                ("logits", self.logits_rows),
            )
        )
        extras = [f"{self.head_groups} head groups"] if self.head_groups > 1 else []
        extras += ["residual in host memory"] if self.host_residual else []
        extras += [f"rows divided over {self.shards} ranks"] if self.shards > 1 else []
        return (
            f"rows a chunk: {', '.join(rows)}{''.join(f'; {extra}' for extra in extras)}; "
            f"predicted peak {readable(self.predicted_peak_bytes)}, "
            f"time {self.predicted_seconds:.3g} s"
        )


def chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    """Consecutive slices of at most `rows_per_chunk` rows that cover `num_rows` rows."""
    for start in range(0, num_rows, rows_per_chunk):
        yield slice(start, min(start + rows_per_chunk, num_rows))


def readable(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"


@dataclass(frozen=True)
class Demand:
    """What a request takes while it runs.

    Attributes:
        length: positions of its sequence.
        sample_positions: of these, positions that are sampled in one step, at most.
        num_sequences: 2 with guidance, which runs the sequence twice.
        keeps_cache: it keeps the keys and values of all its positions, in every sequence.
        window: positions that most of its forwards compute, at most, because those of the others
            are kept; None where every forward may compute all.
        first: positions of its first forward; None where these are all.
        host_layers: of so many layers its kept keys and values lie in host memory.
        spare: positions, besides its own, for requests that read its prompt's keys and values.
        reads_prompt: it reads the prompt's of another one, which counts what both keep.
        unit: its forwards may be computed in parts that are multiples of so many positions, and
            its pages are not counted here; None where neither is so.
        once: it has one forward.
    """

    length: int
    sample_positions: int
    num_sequences: int = 1
    keeps_cache: bool = False
    window: int | None = None
    first: int | None = None
    unit: int | None = None
    host_layers: int = 0
    spare: int = 0
    reads_prompt: bool = False
    once: bool = False

    @property
    def first_rows(self) -> int:
        """Rows of its first forward."""
        if self.reads_prompt:
            return self.steady_rows
        return (self.first or self.length) * self.num_sequences

    def largest_rows(self, row_budget: int) -> int:
        """Rows of its largest forward, where those that can be cut have so many at most."""
        rows = self.steady_rows if self.reads_prompt else self.length * self.num_sequences
        return rows if self.unit is None else min(rows, max(row_budget // self.unit, 1) * self.unit)

    @property
    def steady_rows(self) -> int:
        """Rows that it has in most steps, at most."""
        return (self.window or self.length) * self.num_sequences

    @property
    def shared_rows(self) -> int:
        """Rows of every shared step that it takes, at most.

        Half of them where it has one forward: for while it takes part in a step, another one may
        wait for the step behind, so that a device need not wait for whoever comes next.
        """
        return -(-self.steady_rows // 2) if self.once else self.steady_rows

    @property
    def sample_rows(self) -> int:
        return self.sample_positions * self.num_sequences

    @property
    def cached_positions(self) -> int:
        """Positions of the pages that it takes of what is shared here."""
        if not self.keeps_cache or self.unit is not None or self.reads_prompt:
            return 0
        return in_whole_pages(self.length) * self.num_sequences + self.spare


class Planner:
    """Plans and admission for one model under a budget.

    Args:
        shape: the model's sizes on one rank.
        budget_bytes: of the activation pool: buffers of a step, kept keys and values, graphs.
        row_budget: rows that several requests may share in one step.
        uses_host: the residual stream may lie in host memory where nothing else fits as well.
        host_bytes: of host memory, for keys and values that the device has no room for.
        is_split: memory that PyTorch's temporaries have had in one stage does not serve the buffers
            of another before the step ends, as it is in a pool on virtual memory.
        rates: of the device.
        shards: sequence-parallel ranks, which may divide the rows of a step.
        min_rows: rows of a step from which they do; None for where that pays.
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
        self.host_bytes = host_bytes
        self.budget_bytes = budget_bytes
        self.row_budget = row_budget
        self._is_split = is_split
        self._footprint = Footprint(shape)
        self._costs = Costs(shape, rates)
        self._most_read = max(LOGITS_CHUNK_BYTES // (shape.num_columns * shape.element_bytes), 1)
        self._shards, self._min_rows = shards, min_rows
        # Ways to run with chunks, from the one that computes least to the one that takes least:
        # by how many ranks divide the rows.
        self._layouts = {
            count: [
                Layout(False, groups, host_residual, count)
                for host_residual in ((False, True) if uses_host else (False,))
                for groups in shape.head_groups
                if shape.num_kv_heads // groups % count == 0
            ]
            for count in {1, shards}
        }
        self._row_bytes: dict[tuple[Layout, bool], _RowBytes] = {}
        self._known: dict[tuple[StepShape, int, float], Plan] = {}
        self._placed: dict[tuple[Demand, int], Demand] = {}
        self.num_found = 0  # plans that were not known

    @property
    def cached_positions(self) -> int:
        """Positions whose keys and values several requests may keep: of the whole pages in half of
        the budget, as pages may have to move to where there is room for more of them.
        """
        page_bytes = PAGE_SIZE * self.shape.cache_bytes
        return self.budget_bytes // 2 // page_bytes * PAGE_SIZE

    @cached_property
    def reserved_bytes(self) -> int:
        """What a long step leaves to the steps that run between its slices, where it can."""
        rows = self.row_budget
        shared = self._draft(Layout(keep_queries=True), StepShape(rows, rows, rows, 2))
        return min(shared.whole_bytes, self.budget_bytes // RESERVED_PART)

    # ---- sequence parallelism ----

    def divides(self, step: StepShape) -> bool:
        """Whether ranks divide the rows of a step; what is kept of one is kept by every rank."""
        return self._shards > 1 and step.rows >= self.min_rows and not step.keeps

    @cached_property
    def min_rows(self) -> int:
        """Rows of a step from which ranks divide them: as set, else where it saves a fifth."""
        if self._min_rows is not None:
            return self._min_rows
        rows = MIN_CHUNK_ROWS
        while rows < MOST_MIN_ROWS and not self._gains_by_dividing(StepShape(rows, 1, rows)):
            rows *= 2
        return rows

    def _gains_by_dividing(self, step: StepShape) -> bool:
        share, layout = step.share(self._shards), self._layouts[self._shards][0]
        alone = self._times(step, Layout(keep_queries=True), _Sizes(*[step.rows] * 4))
        divided = self._times(share, layout, _Sizes(*[share.rows] * 4))
        return sum(divided) < WORTH_DIVIDING * sum(alone)

    def _as_computed(self, step: StepShape) -> tuple[StepShape, list[Layout]]:
        """What one rank has of a step, and the ways in which it can be cut."""
        if self.divides(step):
            return step.share(self._shards), self._layouts[self._shards]
        return step, self._layouts[1]

    # ---- admission ----

    def admits(
        self,
        running: Sequence[Demand],
        new: Demand,
        kept_bytes: int = 0,
        long: Collection[Demand] = (),
    ) -> bool:
        """Whether a request may join those that run.

        In most steps all of them fit together. When the larger forwards of several meet, they are
        spread over steps (`engine/turns.py`), so no shared step is beyond the row budget. Alone, a
        request may have any number of rows, and the only one that keeps keys and values any number
        of them.

        Args:
            running: those that run.
            new: who may join them.
            kept_bytes: of the budget, taken by what outlives steps besides.
            long: of all these, whose steps come in slices: they share none.
        """
        together = [*running, new]
        sharing = [demand for demand in together if demand not in long]
        if len(sharing) > 1 and sum(d.shared_rows for d in sharing) > self.row_budget:
            return False
        keeping = [d.cached_positions for d in together if d.cached_positions]
        if len(keeping) > 1 and sum(keeping) > self.cached_positions:
            return False
        kept_bytes += self.kept_bytes(together)
        try:
            for step in self._largest_steps(together, sharing):
                self.plan(step, kept_bytes)
        except ActivationBudgetError:
            return False
        return True

    def kept_bytes(self, demands: Iterable[Demand]) -> int:
        """Of the device, what requests keep between steps."""
        return sum(
            d.cached_positions
            * self.shape.key_value_bytes
            * device_layers(self.shape.num_layers, d.host_layers)
            for d in demands
        )

    def check(self, new: Demand, kept_bytes: int = 0) -> Demand:
        """Refuse a request that would not fit alone with what it keeps.

        Returns:
            the request, with as few layers of its kept keys and values in host memory as leave its
            largest step room for chunks of use, for they are copied in every step.

        Raises:
            ActivationBudgetError: with the bytes it would take, those there are, and the longest
                request of its kind that fits.
        """
        if (new, kept_bytes) not in self._placed:
            if len(self._placed) >= MAX_KNOWN_PLANS:
                self._placed.clear()
            self._placed[new, kept_bytes] = self._place(new, kept_bytes)
        return self._placed[new, kept_bytes]

    def _place(self, new: Demand, kept_bytes: int) -> Demand:
        available = self.budget_bytes - kept_bytes
        for num_chunks in (FEW_CHUNKS, new.length):
            for placed in self._placements(new):
                if self._smallest_alone(placed, num_chunks) <= available:
                    return placed
        raise self._refusal_of(new, kept_bytes)

    def _placements(self, demand: Demand) -> Iterator[Demand]:
        """The request without room for others, then with more and more of what it keeps in host
        memory, as far as that goes.
        """
        yield demand
        if demand.spare:
            demand = replace(demand, spare=0)
            yield demand
        positions, num_layers = demand.cached_positions, self.shape.num_layers
        if not positions:
            return
        most = min(num_layers, self.host_bytes // (positions * self.shape.key_value_bytes))
        for host_layers in range(1, most + 1):
            if device_layers(num_layers, host_layers) < num_layers:
                yield replace(demand, host_layers=host_layers)

    def _smallest_alone(self, demand: Demand, num_chunks: int) -> int:
        """Bytes that it takes with what it keeps, its stages in at most so many chunks."""
        step = self._step_of([demand])
        rows = -(-step.rows // num_chunks)
        return self._smallest_bytes(step, rows) + self.kept_bytes([demand])

    def _refusal_of(self, demand: Demand, kept_bytes: int) -> ActivationBudgetError:
        """With the numbers of the way to place what it keeps that takes least."""

        def smallest(length: int) -> int:
            sampled = -(-demand.sample_positions * length // demand.length)
            shorter = replace(demand, length=length, sample_positions=sampled)
            places = self._placements(shorter)
            return kept_bytes + min(self._smallest_alone(placed, length) for placed in places)

        fits, too_many = 0, demand.length
        while fits + 1 < too_many:
            length = (fits + too_many) // 2
            if smallest(length) <= self.budget_bytes:
                fits = length
            else:
                too_many = length
        required = smallest(demand.length)
        return ActivationBudgetError(demand.length, required, self.budget_bytes, fits)

    def plan_of(self, demands: Sequence[Demand], kept_bytes: int = 0) -> Plan:
        """The plan of a step in which all of them take part. Raises as `plan` does."""
        return self.plan(self._step_of(demands), kept_bytes)

    def seconds_of(self, demand: Demand, rows: int) -> float:
        """Predicted seconds of a step of this request alone, in an empty pool.

        Raises as `plan` does.
        """
        step = self._step_of([demand])
        sample_rows = min(step.sample_rows, rows)
        return self.plan(step._replace(rows=rows, sample_rows=sample_rows)).predicted_seconds

    def _largest_steps(
        self, demands: Sequence[Demand], sharing: Sequence[Demand]
    ) -> Iterator[StepShape]:
        """Every step of these requests, some of which share steps, needs at most what these do."""
        if len(sharing) > 1:
            shared = self._step_of(sharing)
            rows = min(shared.rows, self.row_budget)
            yield shared._replace(rows=rows, sample_rows=min(shared.sample_rows, rows))
        for demand in dict.fromkeys(demands):
            if len(demands) == 1 or demand.largest_rows(self.row_budget) > self.row_budget:
                yield self._step_of([demand])

    def _step_of(self, demands: Sequence[Demand]) -> StepShape:
        """A step in which all of them take part."""
        return StepShape(
            rows=sum(d.largest_rows(self.row_budget) for d in demands),
            sample_rows=sum(d.sample_rows for d in demands),
            longest=max(d.length for d in demands),
            num_sequences=sum(d.num_sequences for d in demands),
            kept_keys=max(d.length if d.keeps_cache else 0 for d in demands),
            keeps=any(d.keeps_cache for d in demands),
        )

    # ---- plans ----

    def plan(self, step: StepShape, kept_bytes: int = 0, longest_chunk_s: float = math.inf) -> Plan:
        """The plan of a step.

        Args:
            step: its sizes.
            kept_bytes: of the budget, taken by what outlives the step.
            longest_chunk_s: predicted seconds of a chunk, at most, where `MIN_CHUNK_ROWS` take
                less; a step can be paused between chunks only.

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

    def plan_beside_others(self, step: StepShape, kept_bytes: int, longest_chunk_s: float) -> Plan:
        """The plan of a step that others run beside: it leaves them a reserve, where it can.

        Args and errors as of `plan`.
        """
        reserved = self.reserved_bytes
        try:
            plan = self.plan(step, kept_bytes + reserved, longest_chunk_s)
        except ActivationBudgetError:
            return self.plan(step, kept_bytes, longest_chunk_s)
        return replace(
            plan,
            predicted_peak_bytes=plan.predicted_peak_bytes - reserved,
            predicted_average_bytes=plan.predicted_average_bytes - reserved,
        )

    def runs_whole(self, num_rows: int, kept_bytes: int = 0) -> bool:
        """Whether a step of so many rows, whatever is read of them, needs no chunks."""
        step = StepShape(num_rows, num_rows, num_rows)
        try:
            return self.plan(step, kept_bytes).is_whole(num_rows)
        except ActivationBudgetError:
            return False

    def _find(self, step: StepShape, kept_bytes: int, longest_chunk_s: float) -> Plan:
        available = self.budget_bytes - kept_bytes
        asked, is_divided = step, self.divides(step)
        step, layouts = self._as_computed(step)
        whole = self._draft(Layout(keep_queries=True), step, longest_chunk_s)
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

    def _draft(self, layout: Layout, step: StepShape, longest_chunk_s: float = math.inf) -> _Draft:
        key = (layout, step.num_sequences > 1)
        row_bytes = self._row_bytes.get(key)
        if row_bytes is None:
            row_bytes = _RowBytes.of(self._footprint, *key, is_split=self._is_split)
            self._row_bytes[key] = row_bytes
        longest = self._longest_chunks(layout, step, longest_chunk_s)
        return _Draft(layout, step, row_bytes, self._most_read, longest)

    def _longest_chunks(self, layout: Layout, step: StepShape, seconds: float) -> _Sizes:
        """Rows of a chunk of every stage that take so long, at most."""
        if seconds == math.inf:
            return _Sizes(*[step.rows] * len(_Sizes._fields))
        longest = []
        for stage in StageSeconds._fields:
            fits, too_many = min(MIN_CHUNK_ROWS, step.rows), step.rows + 1
            while fits + 1 < too_many:
                rows = (fits + too_many) // 2
                chunk = _Sizes(*[rows] * len(_Sizes._fields))
                if getattr(self._chunk_seconds(step, layout, chunk), stage) <= seconds:
                    fits = rows
                else:
                    too_many = rows
            longest.append(fits)
        sizes = _Sizes(*longest)
        if sizes.attend < step.rows:
            waves = self._costs.whole_waves(sizes.attend, layout.head_groups)
            sizes = sizes._replace(attend=waves)
        return sizes

    def _finish(self, draft: _Draft, sizes: _Sizes, kept_bytes: int) -> Plan:
        """The plan of chosen chunks, with what it costs."""
        layout = draft.layout
        peaks = draft.peaks(sizes)
        times = self._times(draft.step, layout, sizes)
        seconds = sum(times)
        weighted = sum(peak * time for peak, time in zip(peaks, times, strict=True))
        return Plan(
            keep_queries=layout.keep_queries,
            keys_values_rows=sizes.keys_values,
            attend_rows=sizes.attend,
            feed_forward_rows=sizes.feed_forward,
            logits_rows=sizes.read,
            head_groups=layout.head_groups,
            host_residual=layout.host_residual,
            predicted_peak_bytes=kept_bytes + max(peaks),
            predicted_average_bytes=kept_bytes + int(weighted / seconds),
            predicted_seconds=seconds,
            chunk_seconds=self._chunk_seconds(draft.step, layout, sizes),
            shards=layout.shards,
        )

    def _times(
        self, step: StepShape, layout: Layout, sizes: _Sizes
    ) -> tuple[float, float, float, float]:
        """Seconds of each stage over all layers."""
        costs, rows, layers = self._costs, step.rows, self.shape.num_layers
        groups, keep = layout.head_groups, layout.keep_queries
        # Of the last layer only the rows that are read are attended to and fed forward.
        updated = layers if is_streamed(layout) else layers - 1 + step.sample_rows / max(rows, 1)
        keys_values = costs.keys_values(
            Work(rows, sizes.keys_values), with_queries=keep, groups=groups
        )
        attend = costs.attend(
            Work(rows, sizes.attend), keys=step.longest, with_queries=not keep, groups=groups
        )
        feed_forward = costs.feed_forward(Work(rows, sizes.feed_forward))
        keys_values += self._exchange_keys_values(Work(rows, sizes.keys_values), layout)
        attend += self._exchange_queries(Work(rows, sizes.attend), layout)
        if layout.host_residual:
            # Each group reads the rows twice, and adds to the updated ones; copies both ways and
            # computing overlap.
            visit = costs.visit(rows)
            keys_values = max(keys_values, groups * visit)
            attend = max(attend, groups * visit * (2 if groups > 1 else 1))
            feed_forward = max(feed_forward, visit)
        logits = costs.logits(Work(step.sample_rows, sizes.read))
        return layers * keys_values, updated * attend, updated * feed_forward, logits

    def _exchange_keys_values(self, work: Work, layout: Layout) -> float:
        """Keys of all heads, and values."""
        groups, shards = layout.head_groups, layout.shards
        row_bytes = self.shape.key_value_bytes // 2 // groups
        return groups * self._costs.exchange(work, row_bytes, shards=shards, count=2)

    def _exchange_queries(self, work: Work, layout: Layout) -> float:
        """Queries of all heads, and what comes back of them."""
        groups, shards = layout.head_groups, layout.shards
        row_bytes = self.shape.query_bytes // groups
        return groups * self._costs.exchange(work, row_bytes, shards=shards, count=2)

    def _chunk_seconds(self, step: StepShape, layout: Layout, sizes: _Sizes) -> StageSeconds:
        """Seconds of the longest chunk of each stage, for one group of heads."""
        costs, groups = self._costs, layout.head_groups
        kv, attend, feed, read = (Work(rows, rows) for rows in sizes)
        with_queries, keys = layout.keep_queries, step.longest
        keys_values_s = costs.keys_values(kv, with_queries=with_queries, groups=groups) / groups
        attend_s = (
            costs.attend(attend, keys=keys, with_queries=not with_queries, groups=groups) / groups
        )
        keys_values_s += self._exchange_keys_values(kv, layout) / groups
        attend_s += self._exchange_queries(attend, layout) / groups
        feed_s, read_s = costs.feed_forward(feed), costs.logits(read)
        if not is_streamed(layout):  # of these rows the last layer is still to come
            read_s += costs.attend(read, keys=keys, with_queries=True, groups=1)
            read_s += costs.feed_forward(read)
        if layout.host_residual:
            keys_values_s = max(keys_values_s, costs.visit(kv.rows))
            attend_s = max(attend_s, costs.visit(attend.rows) * (2 if groups > 1 else 1))
            feed_s = max(feed_s, costs.visit(feed.rows))
        return StageSeconds(keys_values_s, attend_s, feed_s, read_s)

    def _refusal(self, step: StepShape, kept_bytes: int, required: int) -> ActivationBudgetError:
        available = self.budget_bytes - kept_bytes
        fits, too_many = 0, step.rows
        while fits + 1 < too_many:
            rows = (fits + too_many) // 2
            if self._smallest_bytes(_scaled(step, rows)) <= available:
                fits = rows
            else:
                too_many = rows
        longest = _scaled(step, fits).longest
        return ActivationBudgetError(
            step.longest, required + kept_bytes, self.budget_bytes, longest
        )

    def _smallest_bytes(self, step: StepShape, chunk_rows: int = MIN_CHUNK_ROWS) -> int:
        """Of all layouts, with chunks of so many rows at least."""
        step, layouts = self._as_computed(step)
        return min(self._draft(layout, step).bytes_with(chunk_rows) for layout in layouts)


class _Sizes(NamedTuple):
    """Rows of a chunk of every stage."""

    keys_values: int
    attend: int
    feed_forward: int
    read: int


class _Bytes(NamedTuple):
    """What a row of a stage's chunk takes.

    Attributes:
        buffers: of the pool; all that it takes, where the pool is not split.
        temporaries: that PyTorch allocates, where the pool is split.
        few_buffers, few_rows: what it takes of the pool in a chunk of at most so many rows, where
            that is more.
    """

    buffers: int
    temporaries: int
    few_buffers: int = 0
    few_rows: int = 0

    @classmethod
    def of(cls, phases: Phases, is_split: bool) -> _Bytes:
        if not is_split:
            return cls(max(map(total, phases)), 0)
        return cls(max(map(buffered, phases)), max(map(temporary, phases)))

    @classmethod
    def of_feed_forward(cls, footprint: Footprint, layout: Layout, is_split: bool) -> _Bytes:
        few = cls.of(footprint.feed_forward(layout), is_split)
        few_rows = footprint.shape.most_gated_rows
        if few_rows is None:
            return few
        many = cls.of(footprint.feed_forward(layout, is_long=True), is_split)
        return many._replace(few_buffers=few.buffers, few_rows=few_rows)

    def buffers_in(self, rows: int) -> int:
        """Buffers of a chunk of so many rows, which the last of several may not have."""
        return max(rows * self.buffers, min(rows, self.few_rows) * self.few_buffers)

    def rows_in(self, buffers: int, temporaries: int) -> int:
        """Rows that fit into so many bytes of each."""
        is_few = buffers < self.few_rows * self.few_buffers
        rows = buffers // (self.few_buffers if is_few else self.buffers)
        return min(rows, temporaries // self.temporaries) if self.temporaries else rows


class _RowBytes(NamedTuple):
    """What a row takes: of the step, of those that are read, and of a chunk of every stage.

    `collected` is what a kept key takes.
    """

    resident: int
    results: int
    collected: int
    keys_values: _Bytes
    attend: _Bytes
    feed_forward: _Bytes
    read: _Bytes

    @classmethod
    def of(
        cls, footprint: Footprint, layout: Layout, is_packed: bool, *, is_split: bool
    ) -> _RowBytes:
        return cls(
            total(footprint.resident(layout)),
            total(footprint.read_results(layout)),
            footprint.collected_keys(layout),
            _Bytes.of(footprint.keys_values(layout), is_split),
            _Bytes.of(footprint.attend(layout, is_packed=is_packed), is_split),
            _Bytes.of_feed_forward(footprint, layout, is_split),
            _Bytes.of(footprint.read(layout, is_packed=is_packed), is_split),
        )


class _Draft:
    """One way to keep a step's rows, its chunks still open.

    Args:
        layout: the way.
        step: the step.
        row_bytes: of this layout.
        most_read: rows that may have logits at a time.
        longest: rows that a chunk of every stage may have, however much memory there is.
    """

    def __init__(
        self,
        layout: Layout,
        step: StepShape,
        row_bytes: _RowBytes,
        most_read: int,
        longest: _Sizes,
    ) -> None:
        self.layout, self.step, self._longest = layout, step, longest
        self._of_row = row_bytes
        self._resident = row_bytes.resident * step.rows + row_bytes.results * step.sample_rows
        self._resident += row_bytes.collected * step.kept_keys + ROUNDING_BYTES
        self._most_read = min(step.sample_rows, most_read, longest.read)

    @property
    def smallest_bytes(self) -> int:
        return self.bytes_with(MIN_CHUNK_ROWS)

    def bytes_with(self, chunk_rows: int) -> int:
        """Bytes with chunks of at most so many rows, or the smallest that there are."""
        return max(self.peaks(self._at_most(max(chunk_rows, MIN_CHUNK_ROWS))))

    @property
    def whole_bytes(self) -> int:
        return max(self.peaks(self._at_most(self.step.rows)))

    def _at_most(self, rows: int) -> _Sizes:
        """Chunks of at most so many rows in every stage."""
        longest = self._longest
        return _Sizes(
            min(rows, longest.keys_values),
            min(rows, longest.attend),
            min(rows, longest.feed_forward),
            min(rows, self._most_read),
        )

    def ways_to_cut(self, available: int) -> Iterator[_Sizes]:
        """Chunks that fit into `available` bytes.

        In a split pool long chunks of attention may leave the others too little of one kind.
        """
        parts = ATTEND_PARTS if self._of_row.attend.temporaries else (1,)
        return (self.sizes(available, part) for part in parts)

    def sizes(self, available: int, attend_part: int = 1) -> _Sizes:
        """The longest chunks that fit into `available` bytes; attention comes first.

        What attention leaves, buffers or temporaries, the other stages share.

        Args:
            available: bytes.
            attend_part: attention takes one of so many parts of what it could.
        """
        rows, of_row, free = self.step.rows, self._of_row, available - self._resident
        longest = self._longest
        fitting = free // (attend_part * sum(of_row.attend))
        attend = longest.attend  # in whole waves, which equal chunks would not be
        if fitting < attend:
            attend = _chunk_rows(rows, fitting)
        attending = attend * of_row.attend.buffers
        temporaries = attend * of_row.attend.temporaries
        enough_rows = rows if rows <= WHOLE_STEP_ROWS else FULL_SPEED_ROWS
        of_others = max(of_row.keys_values.temporaries, of_row.feed_forward.temporaries)
        temporaries = min(max(temporaries, enough_rows * of_others), free - attending)
        buffers = free - temporaries
        if rows > WHOLE_STEP_ROWS:
            enough = of_row.feed_forward.buffers_in(FULL_SPEED_ROWS)
            buffers = min(buffers, max(attending, enough))
        fitting = of_row.feed_forward.rows_in(buffers, temporaries)
        feed_forward = _chunk_rows(rows, min(fitting, longest.feed_forward))
        fitting = of_row.keys_values.rows_in(buffers, temporaries)
        most_read = max(min(self._most_read, attend, feed_forward), 1)
        return _Sizes(
            _chunk_rows(rows, min(fitting, longest.keys_values)),
            attend,
            feed_forward,
            _chunk_rows(most_read, of_row.read.rows_in(buffers, temporaries)),
        )

    def peaks(self, sizes: _Sizes) -> tuple[int, int, int, int]:
        """Bytes of each stage while it runs, with what is resident."""
        rows, of_row = self.step.rows, self._of_row
        stages = (
            (min(sizes.keys_values, rows), of_row.keys_values),
            (min(sizes.attend, rows), of_row.attend),
            (min(sizes.feed_forward, rows), of_row.feed_forward),
            (min(sizes.read, self.step.sample_rows), of_row.read),
        )
        stays = self._resident + max(count * stage.temporaries for count, stage in stages)
        keys_values, attend, feed_forward, read = (
            stays + stage.buffers_in(count) for count, stage in stages
        )
        return keys_values, attend, feed_forward, read


def _chunk_rows(num_rows: int, most: int) -> int:
    """Rows of as few chunks as possible, of equal size, in whole tiles where that fits."""
    if most >= num_rows:
        return max(num_rows, 1)
    most = max(most, 1)
    most -= most % TILE_ROWS if most > TILE_ROWS else 0
    even = -(-num_rows // -(-num_rows // most))
    return min(-(-even // TILE_ROWS) * TILE_ROWS, most)


def _scaled(step: StepShape, rows: int) -> StepShape:
    """A step of fewer rows of the same kind."""
    share = rows / step.rows
    return step._replace(
        rows=rows,
        sample_rows=math.ceil(step.sample_rows * share),
        longest=int(step.longest * share),
        kept_keys=int(step.kept_keys * share),
    )

# SPDX-License-Identifier: Apache-2.0
"""Plans of steps, and admission by them: which requests run together, and what they keep.

A plan is found when a step of its shape first comes: nothing is measured or stored beforehand.
Nothing here computes with torch, or imports upstream.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.core.stages import device_layers
from vllm.diffusion.memory.cost import H200
from vllm.diffusion.memory.search import PlanSearch
from vllm.diffusion.memory.shapes import StepShape

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from vllm.diffusion.memory.cost import Rates
    from vllm.diffusion.memory.plan import Plan
    from vllm.diffusion.memory.shapes import Demand, ModelShape

MAX_KNOWN_PLANS = 4_096
# Steps share a plan if these sizes round up to equal multiples of a unit: sample rows,
READ_UNITS = 16  # of a unit of 1 / READ_UNITS of the step's rows,
LEAST_READ_UNIT = 32  # but at least this;
KEYS_UNIT = 256  # keys of the longest sequence, and kept keys;
SEQUENCES_UNIT = 16  # sequences, if there are several.
FEW_CHUNKS = 64  # of a stage: with this many a step is hardly slower than with fewer
RESERVED_PART = 8  # at most 1 / RESERVED_PART of the budget is left to short steps

Obstacle = Literal["rows", "memory"]


class Planner:
    """Plans and admission for one model under a budget.

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
        self.shape, self.rates = shape, rates
        self.budget_bytes, self.host_bytes = budget_bytes, host_bytes
        self.row_budget, self._shards = row_budget, shards
        self._search = PlanSearch(
            shape,
            budget_bytes,
            rates,
            uses_host=uses_host,
            is_split=is_split,
            shards=shards,
            min_rows=min_rows,
        )
        self._found = lru_cache(MAX_KNOWN_PLANS)(self._search.find)
        self._placed = lru_cache(MAX_KNOWN_PLANS)(self._place)

    # ---- plans ----

    def plan(self, step: StepShape, kept_bytes: int = 0, longest_chunk_s: float = math.inf) -> Plan:
        """Return the plan of a step.

        Args:
            step: its sizes.
            kept_bytes: bytes of the budget taken by what outlives the step.
            longest_chunk_s: most predicted seconds of a chunk, where `MIN_CHUNK_ROWS` take less.
                Others run between the chunks of a step with such a bound; if it can, it leaves them
                `reserved_bytes`.

        Raises:
            ActivationBudgetError: no plan fits.
        """
        reserved = 0 if longest_chunk_s == math.inf else self.reserved_bytes
        if not reserved:
            return self._found(step, kept_bytes, longest_chunk_s)
        try:
            plan = self._found(step, kept_bytes + reserved, longest_chunk_s)
        except ActivationBudgetError:
            return self._found(step, kept_bytes, longest_chunk_s)
        return replace(
            plan,
            predicted_peak_bytes=plan.predicted_peak_bytes - reserved,
            predicted_average_bytes=plan.predicted_average_bytes - reserved,
        )

    def plan_alike(
        self, step: StepShape, kept_bytes: int = 0, longest_chunk_s: float = math.inf
    ) -> Plan:
        """Plan of the step rounded up if that needs no chunks, else of the exact step.

        It keeps the search off the hot path: as tokens are committed, every step reads fewer rows
        than the one before, and sequences become longer; finding a plan takes the host as long as a
        hundred look-ups. Steps with a bound on their chunks are rare, and never rounded up.
        Arguments and errors are those of `plan`.
        """
        if longest_chunk_s == math.inf:
            with suppress(ActivationBudgetError):
                plan = self.plan(_rounded_up(step), kept_bytes)
                if plan.is_whole(step.rows):
                    return plan
        return self.plan(step, kept_bytes, longest_chunk_s)

    def fits(self, step: StepShape, kept_bytes: int = 0) -> bool:
        """Whether the step has a plan."""
        try:
            self.plan(step, kept_bytes)
        except ActivationBudgetError:
            return False
        return True

    def runs_whole(self, num_rows: int, kept_bytes: int = 0) -> bool:
        """Whether a step of `num_rows` rows, whatever is sampled, needs no chunks."""
        step = StepShape(num_rows, num_rows, num_rows)
        return self.fits(step, kept_bytes) and self.plan(step, kept_bytes).is_whole(num_rows)

    def seconds_of(self, demand: Demand, rows: int) -> float:
        """Return the predicted seconds of a step of a lone request, in an empty pool.

        Raises as `plan` does.
        """
        return self.plan(self.step_of([demand]).with_rows(rows)).predicted_seconds

    def divides(self, step: StepShape) -> bool:
        """Whether ranks divide the rows of a step; a step that keeps is computed by every rank."""
        return self._shards > 1 and self._search.divides(step)

    @property
    def min_rows(self) -> int:
        """Rows of a step from which ranks divide it: as set, else where that saves a fifth."""
        return self._search.min_rows

    @property
    def num_found(self) -> int:
        """Number of searches for a plan so far; other plans were looked up."""
        return self._found.cache_info().misses

    # ---- admission ----

    @property
    def cached_positions(self) -> int:
        """Positions that several requests may keep: whole pages in half of the budget.

        Pages may have to move to where there is room for more of them.
        """
        page_bytes = PAGE_SIZE * self.shape.cache_bytes
        return self.budget_bytes // 2 // page_bytes * PAGE_SIZE

    @cached_property
    def reserved_bytes(self) -> int:
        """Bytes that a long step leaves, if it can, to steps between its slices."""
        rows = self.row_budget
        shared = self._search.whole_bytes(StepShape(rows, rows, rows, 2))
        return min(shared, self.budget_bytes // RESERVED_PART)

    def obstacle(
        self, running: Sequence[Demand], new: Demand, long: Collection[Demand] = ()
    ) -> Obstacle | None:
        """Return what keeps a request from joining those that run: the row budget, or memory.

        In most steps all of them fit together. When larger forwards of several requests meet, they
        are spread over steps (`engine/scheduler/turns.py`), so no shared step is beyond the row
        budget. A lone request may have any number of rows, and one that alone keeps keys and
        values any number of positions.

        Args:
            running: the requests that run.
            new: the request that may join them.
            long: those of these requests whose steps come in slices: they share none.
        """
        together = [*running, new]
        sharing = [demand for demand in together if demand not in long]
        if len(sharing) > 1 and sum(d.shared_rows for d in sharing) > self.row_budget:
            return "rows"
        keeping = [d.cached_positions for d in together if d.cached_positions]
        if len(keeping) > 1 and sum(keeping) > self.cached_positions:
            return "memory"
        kept_bytes = self.kept_bytes(together)
        steps = self._largest_steps(together, sharing)
        return None if all(self.fits(step, kept_bytes) for step in steps) else "memory"

    def kept_bytes(self, demands: Iterable[Demand]) -> int:
        """Bytes of the device that requests keep between steps."""
        return sum(
            d.cached_positions
            * self.shape.key_value_bytes
            * device_layers(self.shape.num_layers, d.host_layers)
            for d in demands
        )

    def check(self, new: Demand) -> Demand:
        """Refuse a request that would not fit alone with what it keeps.

        Returns:
            the request, with as few layers of its kept keys and values in host memory as leave its
            largest step room for chunks of use, for they are copied in every step.

        Raises:
            ActivationBudgetError: with the bytes it would take, those there are, and the longest
                request of its kind that fits.
        """
        return self._placed(new)

    def _place(self, new: Demand) -> Demand:
        for num_chunks in (FEW_CHUNKS, new.length):
            for placed in self._placements(new):
                if self._smallest_alone(placed, num_chunks) <= self.budget_bytes:
                    return placed
        raise self._refusal_of(new)

    def _placements(self, demand: Demand) -> Iterator[Demand]:
        """Yield the demand without spare room, then with more and more layers in host memory."""
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
        """Bytes of a lone request, with what it keeps and at most `num_chunks` chunks a stage."""
        step = self.step_of([demand])
        rows = -(-step.rows // num_chunks)
        return self._search.smallest_bytes(step, rows) + self.kept_bytes([demand])

    def _refusal_of(self, demand: Demand) -> ActivationBudgetError:
        """Make the error of a request that does not fit, for its smallest placement."""

        def smallest(length: int) -> int:
            sampled = -(-demand.sample_positions * length // demand.length)
            shorter = replace(demand, length=length, sample_positions=sampled)
            places = self._placements(shorter)
            return min(self._smallest_alone(placed, length) for placed in places)

        fits = bisect_right(range(1, demand.length), self.budget_bytes, key=smallest)
        required = smallest(demand.length)
        return ActivationBudgetError(demand.length, required, self.budget_bytes, fits)

    def _largest_steps(
        self, demands: Sequence[Demand], sharing: Sequence[Demand]
    ) -> Iterator[StepShape]:
        """Yield steps that need at least as much as any step of these requests.

        Those in `sharing` may share steps.
        """
        if len(sharing) > 1:
            shared = self.step_of(sharing)
            yield shared.with_rows(min(shared.rows, self.row_budget))
        for demand in dict.fromkeys(demands):
            if len(demands) == 1 or demand.largest_rows(self.row_budget) > self.row_budget:
                yield self.step_of([demand])

    def step_of(self, demands: Sequence[Demand]) -> StepShape:
        """Return the sizes of a step in which all of them take part."""
        return StepShape(
            rows=sum(d.largest_rows(self.row_budget) for d in demands),
            sample_rows=sum(d.sample_rows for d in demands),
            longest=max(d.length for d in demands),
            num_sequences=sum(d.num_sequences for d in demands),
            kept_keys=max(d.length if d.keeps_cache else 0 for d in demands),
            keeps=any(d.keeps_cache for d in demands),
        )


def _rounded_up(step: StepShape) -> StepShape:
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

# SPDX-License-Identifier: Apache-2.0
"""Admission by plans: decides which requests run together, and where their caches are.

This module does not compute with torch and does not import upstream.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.pages import part_layers
from vllm.diffusion.core.stages import device_layers
from vllm.diffusion.memory.shapes import RuleMemory, StepShape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from vllm.diffusion.memory.planner import Planner
    from vllm.diffusion.memory.shapes import Demand

MAX_KNOWN_PLACES = 4_096
# Share of a step's time: steps that take at least this share are about as fast.
SAME_SPEED_RATIO = 0.95
# Chunks of a stage: with up to this many, a step is hardly slower than with fewer.
FEW_CHUNKS = 64

Obstacle = Literal["rows", "memory"]


class Admission:
    """Decides which requests fit together, by the plans of the steps that they would have.

    Args:
        planner: plans of the engine's steps; also provides row budget, byte budget and model.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner, self._shape = planner, planner.shape
        self.row_budget, self.budget_bytes = planner.row_budget, planner.budget_bytes
        self._placed = lru_cache(MAX_KNOWN_PLACES)(self._place)

    def obstacle(
        self, running: Sequence[Demand], new: Demand, long: Collection[Demand] = ()
    ) -> Obstacle | None:
        """Return what keeps a request from joining the running ones: the row budget, or memory.

        In most steps all requests fit together. If larger forwards of several requests meet, they
        are spread over steps (`engine/scheduler/turns.py`), so no shared step exceeds the row
        budget. A single request may have any number of rows, and a single request with a cache any
        number of positions. The caches of several requests may take more than half of the budget if
        no step becomes slower and pages can still move.

        Args:
            running: the running requests.
            new: the request that may join them.
            long: those requests whose steps run in slices, so that they share no step.
        """
        together = [*running, new]
        sharing = [demand for demand in together if demand not in long]
        if len(sharing) > 1 and sum(d.shared_rows for d in sharing) > self.row_budget:
            return "rows"
        fits: Callable[[StepShape, int], bool] = self.fits
        keeping = [demand for demand in together if demand.cached_positions]
        num_kept = sum(demand.cached_positions for demand in keeping)
        if len(keeping) > 1 and num_kept > self.planner.cached_positions:
            if not self._can_move(keeping):
                return "memory"
            fits = self._is_as_fast
        kept_bytes = self.kept_bytes(together)
        steps = self._largest_steps(together, sharing)
        return None if all(fits(step, kept_bytes) for step in steps) else "memory"

    def _can_move(self, keeping: Sequence[Demand]) -> bool:
        """Whether all caches but the smallest can be copied while all caches are in memory."""
        if any(demand.host_layers for demand in keeping):
            return False
        smallest = min(keeping, key=lambda demand: demand.cached_positions)
        kept_bytes, least_bytes = self.kept_bytes(keeping), self.kept_bytes([smallest])
        layers = self._shape.num_layers
        twice = (kept_bytes - least_bytes) * part_layers(layers) // layers
        return kept_bytes + twice <= self.budget_bytes

    def _is_as_fast(self, step: StepShape, kept_bytes: int) -> bool:
        """Whether the step is about as fast with these kept bytes as with half of the budget."""
        beside_half = self._seconds(step, self.budget_bytes // 2)
        return SAME_SPEED_RATIO * self._seconds(step, kept_bytes) < beside_half

    def fits(self, step: StepShape, kept_bytes: int = 0) -> bool:
        """Whether the step has a plan."""
        return self._seconds(step, kept_bytes) < math.inf

    def _seconds(self, step: StepShape, kept_bytes: int) -> float:
        """Return the predicted seconds of the step; infinity if it has no plan."""
        try:
            return self.planner.plan(step, kept_bytes).predicted_seconds
        except ActivationBudgetError:
            return math.inf

    def kept_bytes(self, demands: Iterable[Demand]) -> int:
        """Return the device bytes that requests keep between steps, and that their rules take."""
        together = [*demands]
        return RuleMemory.of_all(d.of_rule for d in together) + sum(
            d.cached_positions
            * self._shape.key_value_bytes
            * device_layers(self._shape.num_layers, d.host_layers)
            for d in together
        )

    def check(self, new: Demand) -> Demand:
        """Refuse a request that would not fit alone together with its cache.

        Returns:
            the request, with the smallest number of cached layers in host memory that leaves its
            largest step enough memory for reasonable chunks. Layers in host memory are copied in
            every step, so fewer are better.

        Raises:
            ActivationBudgetError: with the required bytes, the available bytes, and the longest
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
        positions, num_layers = demand.cached_positions, self._shape.num_layers
        if not positions:
            return
        layer_bytes = positions * self._shape.key_value_bytes
        max_layers = min(num_layers, self.planner.host_bytes // layer_bytes)
        for host_layers in range(1, max_layers + 1):
            if device_layers(num_layers, host_layers) < num_layers:
                yield replace(demand, host_layers=host_layers)

    def _smallest_alone(self, demand: Demand, num_chunks: int) -> int:
        """Return the bytes of a single request with its cache, in at most `num_chunks` chunks."""
        step = self.step_of([demand])
        rows = -(-step.rows // num_chunks)
        return self.planner.search.smallest_bytes(step, rows) + self.kept_bytes([demand])

    def _refusal_of(self, demand: Demand) -> ActivationBudgetError:
        """Create the error of a request that does not fit, for its smallest placement."""

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
        """Yield steps that need at least as much memory as any step of these requests.

        Requests in `sharing` may share steps.
        """
        if len(sharing) > 1:
            shared = self.step_of(sharing)
            yield shared.with_rows(min(shared.rows, self.row_budget))
        for demand in dict.fromkeys(demands):
            if len(demands) == 1 or demand.largest_rows(self.row_budget) > self.row_budget:
                yield self.step_of([demand])

    def step_of(self, demands: Sequence[Demand]) -> StepShape:
        """Return the sizes of a step in which all requests take part."""
        return StepShape(
            rows=sum(d.largest_rows(self.row_budget) for d in demands),
            sample_rows=sum(d.sample_rows for d in demands),
            longest=max(d.length for d in demands),
            num_sequences=sum(d.num_sequences for d in demands),
            kept_keys=max(d.length if d.keeps_cache else 0 for d in demands),
            keeps=any(d.keeps_cache for d in demands),
            fp8_attention=len(demands) == 1 and demands[0].fp8_attention,
            adapts=any(d.adapts for d in demands),
        )

    def seconds_of(self, demand: Demand, rows: int) -> float:
        """Return the predicted seconds of a step of a single request, in an empty pool.

        Raises the errors of `Planner.plan`.
        """
        return self.planner.plan(self.step_of([demand]).with_rows(rows)).predicted_seconds

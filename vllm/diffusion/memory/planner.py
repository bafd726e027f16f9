# SPDX-License-Identifier: Apache-2.0
"""Plans of steps: each is found when a step of its shape first comes, and remembered.

Nothing here computes with torch, or imports upstream.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.memory.cost import H200
from vllm.diffusion.memory.search import PlanSearch
from vllm.diffusion.memory.shapes import StepShape

if TYPE_CHECKING:
    from vllm.diffusion.memory.cost import Rates
    from vllm.diffusion.memory.plan import Plan
    from vllm.diffusion.memory.shapes import ModelShape

MAX_KNOWN_PLANS = 4_096
# Steps share a plan if these sizes round up to equal multiples of a unit: sample rows,
SAMPLE_UNITS = 16  # of a unit of 1 / SAMPLE_UNITS of the step's rows,
MIN_SAMPLE_UNIT = 32  # but at least this;
KEYS_UNIT = 256  # keys of the longest sequence, and kept keys;
SEQUENCES_UNIT = 16  # sequences, if there are several.
RESERVED_PART = 8  # at most 1 / RESERVED_PART of the budget is left to short steps


class Planner:
    """Plans for one model under a budget.

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
        search: what finds plans; it knows which steps ranks divide.
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
        self.row_budget = row_budget
        self.search = PlanSearch(
            shape,
            budget_bytes,
            rates,
            uses_host=uses_host,
            is_split=is_split,
            shards=shards,
            min_rows=min_rows,
        )
        self._cached_find = lru_cache(MAX_KNOWN_PLANS)(self.search.find)

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
            return self._cached_find(step, kept_bytes, longest_chunk_s)
        try:
            plan = self._cached_find(step, kept_bytes + reserved, longest_chunk_s)
        except ActivationBudgetError:
            return self._cached_find(step, kept_bytes, longest_chunk_s)
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

    def runs_whole(self, num_rows: int, kept_bytes: int = 0) -> bool:
        """Whether a step of `num_rows` rows, whatever is sampled, needs no chunks."""
        with suppress(ActivationBudgetError):
            step = StepShape(num_rows, num_rows, num_rows)
            return self.plan(step, kept_bytes).is_whole(num_rows)
        return False

    @cached_property
    def reserved_bytes(self) -> int:
        """Bytes that a long step leaves, if it can, to steps between its slices."""
        rows = self.row_budget
        shared = self.search.whole_bytes(StepShape(rows, rows, rows, 2))
        return min(shared, self.budget_bytes // RESERVED_PART)

    @property
    def num_found(self) -> int:
        """Number of searches for a plan so far; other plans were looked up."""
        return self._cached_find.cache_info().misses

    @property
    def cached_positions(self) -> int:
        """Positions that several requests may keep anyhow: whole pages in half of the budget."""
        return self.budget_bytes // 2 // (PAGE_SIZE * self.shape.cache_bytes) * PAGE_SIZE


def _rounded_up(step: StepShape) -> StepShape:
    """Return the largest of the steps that share one plan with this one."""
    is_alone = step.num_sequences == 1
    unit = max(step.rows // SAMPLE_UNITS, MIN_SAMPLE_UNIT)
    return step._replace(
        sample_rows=min(_in_whole(unit, step.sample_rows), step.rows),
        longest=_in_whole(KEYS_UNIT, step.longest),
        num_sequences=1 if is_alone else _in_whole(SEQUENCES_UNIT, step.num_sequences),
        kept_keys=_in_whole(KEYS_UNIT, step.kept_keys),
    )


def _in_whole(unit: int, count: int) -> int:
    return -(-count // unit) * unit

# SPDX-License-Identifier: Apache-2.0
"""Plans of steps: each is searched when a step of its shape first occurs, and then cached.

This module does not compute with torch and does not import upstream.
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
# Steps share a plan if these sizes round up to equal multiples of a unit.
# Sample rows: the unit is 1 / SAMPLE_UNITS of the step's rows, but at least MIN_SAMPLE_UNIT.
SAMPLE_UNITS = 16
MIN_SAMPLE_UNIT = 32  # minimum unit of sample rows
KEYS_UNIT = 256  # unit of the longest sequence's keys, and of cached keys
SEQUENCES_UNIT = 16  # unit of sequences, if there are several
# Part of the budget that cached keys and values leave to steps. Models with window pages cache more
# bytes for each row of a step than others, so steps need a smaller part.
STEPS_PART, STEPS_PART_WITH_WINDOWS = 2, 4
RESERVED_PART = 8  # at most 1 / RESERVED_PART of the budget is left to short steps


class Planner:
    """Plans for one model under a budget.

    Args:
        shape: the model's sizes on one rank.
        budget_bytes: bytes of the activation pool, for buffers of a step, cached keys and values,
            and graphs.
        row_budget: rows that several requests may share in one step.
        uses_host: whether the residual stream may be in host memory if that gives the best plan.
        host_bytes: bytes of host memory for keys and values that do not fit on the device.
        is_split: whether memory of PyTorch's temporaries in one stage cannot be reused for another
            stage's buffers before the step ends, as in a pool on virtual memory.
        rates: rates of the device.
        shards: number of sequence-parallel ranks, which may divide the rows of a step.
        min_rows: minimum rows of a step that they divide; None to divide when it pays.

    Attributes:
        search: finds plans; it also decides which steps ranks divide.
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
            step: sizes of the step.
            kept_bytes: bytes of the budget taken by data that outlives the step.
            longest_chunk_s: maximum predicted seconds of a chunk, unless `MIN_CHUNK_ROWS` take
                longer. Other steps run between the chunks of a step with such a bound; if possible,
                it leaves them `reserved_bytes`.

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
        """Return the plan of the rounded-up step if that needs no chunks, else of the exact step.

        This keeps the search off the hot path. As tokens are committed, every step has fewer sample
        rows than the previous one, and sequences become longer. Finding a plan takes the host as
        long as a hundred look-ups. Steps with a bound on their chunks are rare, and never rounded
        up. Arguments and errors as in `plan`.
        """
        if longest_chunk_s == math.inf:
            with suppress(ActivationBudgetError):
                plan = self.plan(_rounded_up(step), kept_bytes)
                if plan.is_whole(step.rows):
                    return plan
        return self.plan(step, kept_bytes, longest_chunk_s)

    def runs_whole(self, num_rows: int, kept_bytes: int = 0) -> bool:
        """Whether a step of `num_rows` rows needs no chunks, for any number of sample rows."""
        with suppress(ActivationBudgetError):
            step = StepShape(num_rows, num_rows, num_rows)
            return self.plan(step, kept_bytes).is_whole(num_rows)
        return False

    @cached_property
    def reserved_bytes(self) -> int:
        """Bytes that a long step leaves, if possible, to steps between its slices."""
        rows = self.row_budget
        shared = self.search.whole_bytes(StepShape(rows, rows, rows, 2))
        return min(shared, self.budget_bytes // RESERVED_PART)

    @property
    def num_found(self) -> int:
        """Number of searches for a plan so far; all other plans were cached."""
        return self._cached_find.cache_info().misses

    @property
    def cached_positions(self) -> int:
        """Positions that several requests may always cache: whole pages in a part of the budget.

        Window pages take some of the same bytes.
        """
        part = STEPS_PART if self.shape.window_layers is None else STEPS_PART_WITH_WINDOWS
        cached_bytes = self.budget_bytes - -(-self.budget_bytes // part)
        return cached_bytes // (PAGE_SIZE * self.shape.cache_bytes) * PAGE_SIZE


def _rounded_up(step: StepShape) -> StepShape:
    """Return the largest of the steps that share one plan with this step."""
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

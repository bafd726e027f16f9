# SPDX-License-Identifier: Apache-2.0
"""How the rows of a step are cut into chunks, and which requests may share a step.

This planner has a fixed row budget: requests share a step while their rows stay within it, and a
request is never refused for its own rows alone. Every stage runs as one chunk, but for the
logits, which are cut so that the largest `[rows, vocabulary]` buffer stays small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LOGITS_CHUNK_ELEMENTS = 1 << 27  # 256 MiB of bf16


@dataclass(frozen=True)
class Plan:
    """Rows per chunk of every stage of one step.

    Attributes:
        keep_queries: queries are computed together with keys and values and kept for the step.
        keys_values_rows, attend_rows, feed_forward_rows, logits_rows: chunk sizes, in rows.
    """

    keep_queries: bool
    keys_values_rows: int
    attend_rows: int
    feed_forward_rows: int
    logits_rows: int

    def is_whole(self, num_rows: int) -> bool:
        """Whether every stage of a layer takes `num_rows` rows as one chunk."""
        sizes = (self.keys_values_rows, self.attend_rows, self.feed_forward_rows)
        return self.keep_queries and min(sizes) >= num_rows

    def resized(self, num_rows: int) -> Plan:
        """The same plan for a whole step of `num_rows` rows."""
        return replace(
            self, keys_values_rows=num_rows, attend_rows=num_rows, feed_forward_rows=num_rows
        )


def chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    """Consecutive slices of at most `rows_per_chunk` rows that cover `num_rows` rows."""
    for start in range(0, num_rows, rows_per_chunk):
        yield slice(start, min(start + rows_per_chunk, num_rows))


@dataclass(frozen=True)
class Demand:
    """What a request takes while it runs.

    Attributes:
        rows: rows of one of its steps.
        cached_positions: positions whose keys and values it keeps.
    """

    rows: int
    cached_positions: int = 0


class Planner:
    """Admission and chunk sizes under a fixed row budget, and a budget for kept keys and values.

    Args:
        row_budget: rows that several requests may share in one step.
        vocab_size: columns of the logits on this rank.
        cached_positions: positions whose keys and values fit into the memory for caches.
    """

    def __init__(self, row_budget: int, vocab_size: int, cached_positions: int = 2**63 - 1) -> None:
        self.row_budget = row_budget
        self.vocab_size = vocab_size
        self.cached_positions = cached_positions

    def admits(self, running: Sequence[Demand], new: Demand) -> bool:
        """Whether a request may join those that run; alone it may have any number of rows."""
        together = [*running, new]
        rows_fit = not running or sum(d.rows for d in together) <= self.row_budget
        return rows_fit and sum(d.cached_positions for d in together) <= self.cached_positions

    def plan(self, num_rows: int) -> Plan:
        """The plan of a step of `num_rows` rows."""
        rows = max(num_rows, 1)
        return Plan(
            keep_queries=True,
            keys_values_rows=rows,
            attend_rows=rows,
            feed_forward_rows=rows,
            logits_rows=max(1, LOGITS_CHUNK_ELEMENTS // self.vocab_size),
        )

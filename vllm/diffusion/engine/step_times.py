# SPDX-License-Identifier: Apache-2.0
"""Times of steps by their number of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.ops import Array

# Numbers of rows for which CUDA graphs are captured, and for which times are listed.
ROW_BUCKETS = (
    *range(16, 64, 16),
    *range(64, 256, 32),
    *range(256, 512, 64),
    *range(512, 1536, 128),
    *range(1536, 2048, 256),
    *range(2048, 4096 + 1, 512),
)


class StepTimes(NamedTuple):
    """Times of steps by number of rows, which is rounded up to the next listed size.

    Attributes:
        rows: [N] int64, the listed sizes, ascending.
        seconds: [N + 1] float64, their times; the last entry is the time of larger steps.
    """

    rows: Array
    seconds: Array

    @classmethod
    def of(cls, known: Mapping[int, float]) -> StepTimes:
        """Build the table from known times; steps with more rows than the table never pay."""
        rows = sorted(known)
        return cls(np.array(rows), np.array([*(known[size] for size in rows), np.inf]))

    def at(self, rows: Array | int) -> Array:
        """Return the times [R] of steps with `rows` rows."""
        seconds: Array = self.seconds[self.rows.searchsorted(rows)]
        return seconds

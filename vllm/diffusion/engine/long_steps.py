# SPDX-License-Identifier: Apache-2.0
"""Messages between scheduler and workers about a long step that is computed in slices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSlice:
    """A part of one request's step; the step is paused after it.

    Attributes:
        req_id: the request, one of the requests that take part in the step.
        rows: maximum rows of the step, if it begins with this slice.
        seconds: predicted seconds of work; the step stops at the end of the last chunk that fits
            into them, but computes at least one chunk.
    """

    req_id: str
    rows: int
    seconds: float


@dataclass(frozen=True)
class PausedStep:
    """A step that waits for its next slice.

    Attributes:
        req_id: the only request of the step.
        held_bytes: bytes of the pool that are not available to other steps meanwhile.
    """

    req_id: str
    held_bytes: int


@dataclass(frozen=True)
class SliceTiming:
    """Sums over finished slices.

    Attributes:
        seconds: predicted seconds of their work.
        taken_s: measured seconds on the device of one rank.
        num_slices: number of slices.
    """

    seconds: float
    taken_s: float
    num_slices: int

# SPDX-License-Identifier: Apache-2.0
"""What scheduler and workers say of a long step that is computed in slices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepSlice:
    """A part of one request's step, which is paused after it.

    Attributes:
        req_id: the request, one of those that take part in the step.
        rows: rows that its step may have, if it begins with this slice.
        seconds: work as the planner predicts it; the step stops at the end of a chunk before they
            are over, but computes at least one.
    """

    req_id: str
    rows: int
    seconds: float


@dataclass(frozen=True)
class PausedStep:
    """A step that waits for its next slice.

    Attributes:
        req_id: its only request.
        held_bytes: bytes of the pool that other steps cannot have meanwhile.
    """

    req_id: str
    held_bytes: int


@dataclass(frozen=True)
class SliceTiming:
    """Sum of slices that are over.

    Attributes:
        seconds: their work, as the planner predicts it.
        taken_s: seconds that the device of one rank took for it.
        num_slices: number of slices.
    """

    seconds: float
    taken_s: float
    num_slices: int

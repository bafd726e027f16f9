# SPDX-License-Identifier: Apache-2.0
"""Messages between scheduler and workers about long steps, which are computed in slices."""

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
class LongSteps:
    """What the scheduler decides about long requests, as a part of its message.

    Attributes:
        req_ids: the long requests, whether they take part in the next step or not. No step is
            launched as a whole for them.
        next_slice: the slice that the next step computes for one of them, if one is due.
    """

    req_ids: tuple[str, ...] = ()
    next_slice: StepSlice | None = None


NO_LONG_STEPS = LongSteps()


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
class LongStepReport:
    """What a worker reports about slices, as a part of its message.

    The numbers are sums over the slices that have ended since the last report.

    Attributes:
        paused: the step that waits for its next slice, if there is one.
        seconds: predicted seconds of the slices' work.
        taken_s: measured seconds on the device of one rank.
        num_slices: number of slices.
    """

    paused: PausedStep | None
    seconds: float = 0.0
    taken_s: float = 0.0
    num_slices: int = 0

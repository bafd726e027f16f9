# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler and the workers, once per denoise step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.diffusion.core.trajectory import Trajectory
    from vllm.diffusion.engine.long_steps import PausedStep, SliceTiming, StepSlice
    from vllm.diffusion.memory import Rates
    from vllm.diffusion.request.likelihood import TokenScores
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.v1.outputs import LogprobsLists

# Sample rows of a first forward whose hidden states are kept for requests that share its prompt.
MAX_SHARED_ROWS = 8_192


@dataclass(frozen=True)
class NewCanvas:
    """A request that starts with this step; `params.seed` is drawn.

    `host_layers` is the number of layers whose kept keys and values lie in host memory. `prompt_of`
    names a running request that has computed what its first forward begins with
    (`prompt_groups.py`). `kept_positions` are of the pages that it takes, with those of requests
    that will read its prompt.
    """

    req_id: str
    prompt_token_ids: list[int]
    params: DiffusionParams
    host_layers: int = 0
    prompt_of: str | None = None
    kept_positions: int = 0


@dataclass(frozen=True)
class NewPages:
    """Pages handed to a request.

    Attributes:
        page_ids: their numbers in the store.
        num_kept: positions, from 0, whose keys and values they hold, if they replace all that the
            request had; None if they extend those.
    """

    page_ids: list[int]
    num_kept: int | None = None


@dataclass(frozen=True)
class CanvasView:
    """The canvas of N positions after a forward, packed: it crosses processes in every step.

    Attributes:
        step: number of the step, from 1.
        token_ids: N int32, little-endian: the committed token, else the newest proposal, else the
            mask token.
        committed: N bytes, 1 where the token is committed.
        confidence: N fp32, little-endian: the model's probability of the token in the forward that
            proposed it; NaN where none has.
        guessed: N bytes, 1 where an accepted draft committed the token; None for requests
            without drafts.
    """

    step: int
    token_ids: bytes
    committed: bytes
    confidence: bytes
    guessed: bytes | None = None


@dataclass(frozen=True)
class StepResult:
    """Result of a step for one request.

    Attributes:
        new_token_ids: tokens that became part of the finished prefix of the canvas.
        num_steps: steps of the request so far: forwards of the loop that takes one at a time.
        num_forwards: forwards of the request so far; one may serve several steps.
        num_drafts: drafts that were evaluated so far.
        num_committed: canvas positions committed so far.
        next_rows: rows of its next forward; 0 where it has none.
        infilled: tokens that replaced mask tokens of the prompt so far, by position.
        error: why the request cannot go on, if it cannot.
        logprobs: log probabilities of `new_token_ids`, for requests that ask for them.
        canvas: the canvas, for requests that ask to see it.
        scores: the answer to a likelihood request.
        num_kept: positions from 0 whose keys and values are kept; its next forward begins there.
        is_closed: the answer fills its room with a whole string of its language, which no text
            could continue.
        trajectory: how the answer came about, for requests that ask, once it may be complete.
    """

    new_token_ids: list[int]
    num_steps: int
    num_forwards: int
    num_committed: int
    next_rows: int = 0
    num_drafts: int = 0
    infilled: dict[int, int] = field(default_factory=dict)
    error: str | None = None
    logprobs: LogprobsLists | None = None
    canvas: CanvasView | None = None
    scores: TokenScores | None = None
    num_kept: int = 0
    is_closed: bool = False
    trajectory: Trajectory | None = None


@dataclass(frozen=True)
class StepUsage:
    """Memory of a step on one rank, in bytes unless a field says otherwise.

    Attributes:
        budget_bytes: most bytes for buffers of steps and kept keys and values together.
        rates: rates of the device.
        in_use_bytes: kept keys and values, which stay between steps.
        host_bytes: host memory of kept keys and values.
        peak_bytes: the most in use at any time of the step; 0 when nothing ran.
        average_bytes: average in use, weighted by time, as the plan of the step predicts it.
        planner_us: microseconds that planning took.
    """

    budget_bytes: int
    rates: Rates
    in_use_bytes: int = 0
    host_bytes: int = 0
    peak_bytes: int = 0
    average_bytes: int = 0
    planner_us: float = 0.0

    def report(self) -> dict[str, int]:
        """Fields that a client sees of the largest step of its request."""
        return {
            "peak_bytes": self.peak_bytes,
            "average_bytes": self.average_bytes,
            "budget_bytes": self.budget_bytes,
        }


@dataclass
class DiffusionSchedulerOutput(SchedulerOutput):
    """Upstream's message plus the requests that start (`admitted`).

    `num_scheduled_tokens` names the requests that take part in this step, with their rows: those of
    the first step named by `launched` of the previous answer, if any are left. Other requests run
    but wait their turn. `long` names those of which no step is launched as a whole any more, and
    `next_slice` the one of them that continues in this step. `finished_req_ids` names those whose
    canvas is no longer needed; `scheduled_at` is `time.monotonic()`. `new_pages` holds, by request,
    pages that the scheduler hands out; workers assign them before the step. With `should_drain`
    nothing new is launched, only a step in flight is collected. `generation` is that of the weights
    that the scheduler has acknowledged: a worker with newer weights takes no step before that.
    """

    admitted: list[NewCanvas] = field(default_factory=list)
    new_pages: dict[str, NewPages] = field(default_factory=dict)
    scheduled_at: float = 0.0
    next_slice: StepSlice | None = None
    long: list[str] = field(default_factory=list)
    should_drain: bool = False
    generation: int = 0


@dataclass
class DiffusionRunnerOutput(ModelRunnerOutput):
    """Upstream's message plus the result of every request that took part in the step.

    `usage` is the memory that the step took, and what there is; `num_rows` the rows computed;
    `launched` the requests of each of the next steps under way; `paused` the long step that waits
    for its next slice; `slice_timing` sums the slices that have ended since the last message.
    `generation` is that of the weights. If it is a new one, `invalidated` has the rows of every
    request's next forward, which begins without kept keys and values.
    """

    results: dict[str, StepResult] = field(default_factory=dict)
    usage: StepUsage | None = None
    num_rows: int = 0
    launched: list[list[str]] = field(default_factory=list)
    paused: PausedStep | None = None
    slice_timing: SliceTiming | None = None
    generation: int = 0
    invalidated: dict[str, int] = field(default_factory=dict)

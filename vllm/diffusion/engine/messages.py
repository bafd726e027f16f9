# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler and the workers, once per denoising step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.diffusion.engine.long_steps import NO_LONG_STEPS
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.adapters.known_adapters import AdapterReport
    from vllm.diffusion.core.canvas_view import CanvasView
    from vllm.diffusion.core.trajectory import Trajectory
    from vllm.diffusion.engine.long_steps import LongStepReport, LongSteps
    from vllm.diffusion.memory import Rates
    from vllm.diffusion.request.likelihood import TokenScores
    from vllm.diffusion.request.params import DiffusionParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.outputs import LogprobsLists


@dataclass(frozen=True)
class NewCanvas:
    """A request that starts with this step; `params.seed` is drawn.

    `host_layers` is the number of layers whose cached keys and values are in host memory.
    `prompt_of` names a running request that has computed the beginning of this request's first
    forward (`prompt_groups.py`). `kept_positions` counts the positions of the pages that the
    request takes, including pages of requests that will read its prompt. `adapter` is its LoRA
    adapter, if it has one.
    """

    req_id: str
    prompt_token_ids: list[int]
    params: DiffusionParams
    host_layers: int = 0
    prompt_of: str | None = None
    kept_positions: int = 0
    adapter: LoRARequest | None = None


@dataclass(frozen=True)
class NewPages:
    """Pages assigned to a request.

    Attributes:
        page_ids: page numbers in the store.
        num_kept: number of positions, from 0, whose keys and values the pages hold, if they replace
            all pages of the request; None if they extend its pages.
        window_ids: page numbers, at the same positions, for layers with a window, negative for
            none; empty if all layers have the same pages.
    """

    page_ids: list[int]
    num_kept: int | None = None
    window_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class StepResult:
    """Result of a step for one request.

    Attributes:
        new_token_ids: tokens that became part of the finished prefix of the canvas.
        num_steps: denoising steps of the request so far, as if none were speculative.
        num_forwards: forwards of the request so far; one forward may serve several steps.
        num_drafts: draft states that were evaluated so far.
        report: numbers of the decoding rule so far and facts of the engine, for the report of the
            answer.
        num_committed: canvas positions committed so far.
        next_rows: rows of its next forward; 0 if there is none.
        infilled: tokens that replaced mask tokens of the prompt so far, by position.
        error: error that ends the request, if any.
        logprobs: log probabilities of `new_token_ids`, for requests that ask for them.
        canvas: the canvas, for requests that ask for it.
        scores: result of a likelihood request.
        num_kept: number of positions, from 0, whose keys and values are cached; the next forward
            begins after them.
        new_lengths: lengths that the canvas takes before the answer can continue, in order; empty
            if it keeps its length.
        is_closed: whether the answer fills its positions with a whole string of its language that
            no text could continue.
        trajectory: history of the answer, for requests that ask for it, once the answer may be
            complete.
    """

    new_token_ids: list[int]
    num_steps: int
    num_forwards: int
    num_committed: int
    next_rows: int = 0
    num_drafts: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)
    infilled: dict[int, int] = field(default_factory=dict)
    error: str | None = None
    logprobs: LogprobsLists | None = None
    canvas: CanvasView | None = None
    scores: TokenScores | None = None
    num_kept: int = 0
    new_lengths: tuple[int, ...] = ()
    is_closed: bool = False
    trajectory: Trajectory | None = None


@dataclass(frozen=True)
class StepUsage:
    """Memory of a step on one rank, in bytes unless a field states otherwise.

    Attributes:
        budget_bytes: maximum bytes of step buffers and cached keys and values together.
        rates: rates of the device.
        in_use_bytes: cached keys and values, which stay between steps.
        host_bytes: host memory of cached keys and values.
        peak_bytes: peak use during the step; 0 if nothing ran.
        average_bytes: average use, weighted by time, as predicted by the plan of the step.
        planner_us: microseconds that planning took.
    """

    budget_bytes: int
    rates: Rates
    in_use_bytes: int = 0
    host_bytes: int = 0
    peak_bytes: int = 0
    average_bytes: int = 0
    planner_us: float = 0.0


@dataclass
class DiffusionSchedulerOutput(SchedulerOutput):
    """Upstream's message plus the requests that start (`admitted`).

    `num_scheduled_tokens` maps the requests that take part in this step to their rows. If the
    previous answer's `launched` lists steps, these are the requests of the first of them. All other
    running requests wait for their turn. `long_steps` has the decisions about long requests.
    `finished_req_ids` names requests whose canvas is no longer needed. `scheduled_at` is
    `time.monotonic()`. `new_pages` holds the pages that the scheduler assigns, by request; workers
    assign them before the step. With `should_drain` nothing is launched, and only a step in flight
    is collected. `epoch` counts how often cached results were dropped, up to the last drop
    that the scheduler has acknowledged: a worker with a later epoch runs no step before that.
    `awaited_adapters` has the numbers of the adapters of waiting requests.
    """

    admitted: list[NewCanvas] = field(default_factory=list)
    new_pages: dict[str, NewPages] = field(default_factory=dict)
    scheduled_at: float = 0.0
    long_steps: LongSteps = NO_LONG_STEPS
    should_drain: bool = False
    epoch: int = 0
    awaited_adapters: frozenset[int] = frozenset()


@dataclass
class DiffusionRunnerOutput(ModelRunnerOutput):
    """Upstream's message plus the result of every request that took part in the step.

    `usage` is the memory that the step used and that is available. `num_rows` counts the computed
    rows. `launched` lists the requests of each step in flight. `long_steps` has the report about
    long requests, if there is one. `epoch` is the current epoch. If it is new, `invalidated` has
    the rows of every request's next forward, which begins without cached keys and values.
    `renewed_adapters` has the generation of each adapter that was replaced or removed since the
    last message; `invalidated` then has the rows of its requests. `adapter_report` has news about
    adapters.
    """

    results: dict[str, StepResult] = field(default_factory=dict)
    usage: StepUsage | None = None
    num_rows: int = 0
    launched: list[list[str]] = field(default_factory=list)
    long_steps: LongStepReport | None = None
    epoch: int = 0
    invalidated: dict[str, int] = field(default_factory=dict)
    renewed_adapters: dict[int, int] = field(default_factory=dict)
    adapter_report: AdapterReport | None = None

# SPDX-License-Identifier: Apache-2.0
"""What crosses between the scheduler and the workers, once per denoise step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm.diffusion.params import DiffusionParams


@dataclass(frozen=True)
class NewCanvas:
    """A request that starts with this step; `params.seed` is drawn."""

    req_id: str
    prompt_token_ids: list[int]
    params: DiffusionParams


@dataclass(frozen=True)
class StepResult:
    """What one request got out of a step.

    Attributes:
        new_token_ids: tokens that became part of the finished prefix of the canvas.
        num_forwards: forwards of the request so far.
        num_committed: canvas positions committed so far.
        infilled: tokens that replaced mask tokens of the prompt so far, by position.
        error: why the request cannot go on, if it cannot.
    """

    new_token_ids: list[int]
    num_forwards: int
    num_committed: int
    infilled: dict[int, int] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class MemoryUse:
    """Memory of activations, and of keys and values kept between steps, on one rank.

    Attributes:
        budget_bytes: what they may take.
        in_use_bytes: what they take after the step.
        peak_bytes: the most they have taken since the engine started.
        planner_seconds: time that planning the step took.
    """

    budget_bytes: int
    in_use_bytes: int
    peak_bytes: int
    planner_seconds: float


@dataclass
class DiffusionSchedulerOutput(SchedulerOutput):
    """Upstream's message plus the requests that start (`admitted`).

    `num_scheduled_tokens` names the requests that take part in the step, with their rows;
    `finished_req_ids` those whose canvas is no longer needed; `scheduled_at` is `time.monotonic()`.
    """

    admitted: list[NewCanvas] = field(default_factory=list)
    scheduled_at: float = 0.0


@dataclass
class DiffusionRunnerOutput(ModelRunnerOutput):
    """Upstream's message plus the result of every request that took part in the step.

    `num_rows` is what the step computed; `memory` is None where no step ran.
    """

    results: dict[str, StepResult] = field(default_factory=dict)
    num_rows: int = 0
    memory: MemoryUse | None = None

# SPDX-License-Identifier: Apache-2.0
"""Steps of block-causal families: a window of each request over the keys and values before it.

This is the common part of `step_latency.py`, `commit_fusion.py` and `prefix_cache.py`.
"""

from __future__ import annotations

import statistics
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks import gpu_timing, in_process
from benchmarks.harness import BenchmarkError
from benchmarks.shapes import Shape, window_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.in_process import Step

QK_GAIN = 3.0


@dataclass(frozen=True)
class Windows:
    """Concurrent requests, each with a block after its own `context` positions."""

    context: int
    block_length: int
    num_requests: int

    @property
    def num_rows(self) -> int:
        """Number of rows of a step in which every request computes one block."""
        return self.num_requests * self.block_length

    def is_window(self, step: Step) -> bool:
        """Whether every request of a step computed one block."""
        return bool(step.num_sampled) and step.num_rows == step.num_requests * self.block_length


def parameters_of(
    shape: Shape, block_length: int, num_blocks: int, steps_per_block: int
) -> dict[str, Any]:
    """Return a request's parameters with kept keys and `tokens_a_step` tokens per step."""
    parameters = {"gen_length": num_blocks * block_length, "block_length": block_length}
    if shape.shifts_rows:
        return {**parameters, "algorithm": "hierarchy_block", "threshold": 1.0}
    return {**parameters, "algorithm": "semi_ar", "steps_per_block": steps_per_block}


def kept_parameters(
    shape: Shape, gen_length: int, block_length: int, tokens_a_step: int = 1
) -> dict[str, Any]:
    """Return a request's parameters with kept keys and `tokens_a_step` tokens per step."""
    if shape.block_length:
        steps = max(block_length // tokens_a_step, 1)
        return parameters_of(shape, block_length, gen_length // block_length, steps)
    parameters = {"gen_length": gen_length, "block_length": block_length, "cache": "dual"}
    return {**parameters, "algorithm": "semi_ar", "steps": gen_length // tokens_a_step}


def blocks_of(steps: int, block_length: int) -> int:
    """Return how many blocks have `steps` steps of one block each, with one token per step.

    The first step of a block also computes the block before it, and the first block may start in
    parts.
    """
    return 2 + -(-steps // max(block_length - 1, 1))


def logged_steps(llm: Any, runner: Any, shape: Shape, case: Windows, steps: int) -> list[Step]:
    """Run at least `steps` windows, one token per forward; return all steps in order.

    Prompts are the same in every call. From the second call on their keys and values are in the
    prefix cache, and the requests stay in step with each other.
    """
    num_blocks = blocks_of(steps, case.block_length)
    parameters = parameters_of(shape, case.block_length, num_blocks, case.block_length)
    return in_process.timed_steps(llm, runner, prompts_of(shape, case), parameters)


def run_windows(llm: Any, runner: Any, shape: Shape, case: Windows, steps: int) -> list[Step]:
    """Return the steps of `logged_steps` in which every request computes one block.

    Raises:
        BenchmarkError: The engine had fewer than `steps`.
    """
    window_steps = [
        step for step in logged_steps(llm, runner, shape, case, steps) if case.is_window(step)
    ]
    together = [step for step in window_steps if step.num_requests == case.num_requests]
    if len(together) < steps:
        raise BenchmarkError(f"wanted {steps} steps of {case}, got {len(together)}")
    return together


class Round(NamedTuple):
    """One forward of every request, in one or more steps of the engine.

    Attributes:
        round_ms: milliseconds from the start of its first step to the start of the next round.
        device_ms: milliseconds between the events around its steps; None on the CPU.
    """

    round_ms: float
    device_ms: float | None


def served_round(llm: Any, runner: Any, shape: Shape, case: Windows, steps: int) -> Round:
    """Measure the mean round of requests if the engine chooses the batches."""
    logged = logged_steps(llm, runner, shape, case, steps)
    pairs = [(a, b) for a, b in pairwise(logged) if case.is_window(a) and case.is_window(b)]
    rounds = sum(a.num_requests for a, _ in pairs) / case.num_requests
    device = [a.device_ms for a, _ in pairs if a.device_ms is not None]
    return Round(
        1000 * sum(b.started - a.started for a, b in pairs) / rounds,
        sum(device) / rounds if device else None,
    )


def timed_requests(
    llm: Any, runner: Any, prompts: Sequence[Sequence[int]], parameters: dict[str, Any]
) -> tuple[int, float]:
    """Run requests; return the number of steps, and the seconds from first start to last end."""
    steps = in_process.timed_steps(llm, runner, prompts, parameters)
    return len(steps), in_process.seconds_of(steps)


def prompts_of(shape: Shape, case: Windows) -> list[list[int]]:
    """Return random prompts, a different one for every request."""
    return in_process.random_prompts(case.num_requests, case.context, shape.vocab_size)


def floor_ms(
    shape: Shape,
    case: Windows,
    steps: Sequence[Step],
    touched_experts: float | None,
    ceilings: dict[str, Any],
) -> float | None:
    """Compute the least time of a window step from this card's rates; None without a CUDA device.

    Every stage waits for the previous one, so their least times add up.
    """
    if not torch.cuda.is_available():
        return None
    head_rows = statistics.mean(step.num_sampled for step in steps) / case.num_requests
    stages = window_stages(
        shape,
        case.block_length,
        case.context,
        case.num_requests,
        head_rows=head_rows,
        touched_experts=touched_experts,
    )
    rates = gpu_timing.rates(0, shape.num_heads, shape.head_dim, ceilings)
    return sum(stage.least_ms(*rates) for stage in stages)


# --- experts ---------------------------------------------------------------------------------


@contextmanager
def routed(
    runner: Any, observe: Callable[[torch.Tensor, torch.Tensor, Any], None]
) -> Iterator[None]:
    """Call `observe` with rows, router and choice of all layers' experts; layers run eagerly."""
    from vllm.diffusion import ops

    route = ops.route_rows

    def recorded(x: torch.Tensor, gate: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        routing = route(x, gate, *arguments, **options)
        observe(x, gate, routing)
        return routing

    graphs = runner.graphs
    if graphs is not None:
        graphs.run = lambda *_: None
    ops.route_rows = recorded
    try:
        yield
    finally:
        ops.route_rows = route
        if graphs is not None:
            del graphs.run


@torch.inference_mode()
def spread_experts(runner: Any, num_rows: int, run: Callable[[], object]) -> None:
    """Draw routers with which similar rows choose different experts, as in trained models.

    Masked rows differ only in the positions that they attend to. So attention is made sharper. And
    from each router the direction is removed that all rows share in the first step of `run` with
    `num_rows` rows.
    """
    for name, parameter in runner.model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            parameter.fill_(QK_GAIN)
    freed = set()

    def free(x: torch.Tensor, gate: torch.Tensor, _routing: Any) -> None:
        if len(x) == num_rows and gate.data_ptr() not in freed:
            freed.add(gate.data_ptr())
            mean = x.float().mean(dim=0)
            shared = torch.outer(gate.float() @ mean, mean) / mean.dot(mean)
            gate.copy_(gate.float() - shared)

    with routed(runner, free):
        run()


def touched_experts(runner: Any, num_rows: int, run: Callable[[], object]) -> float:
    """Count the experts of a layer that any row uses, as the mean over layers and full steps."""
    counts: list[torch.Tensor] = []

    def count(x: torch.Tensor, gate: torch.Tensor, routing: Any) -> None:
        if len(x) == num_rows:
            ends = routing[2]
            rows = ends.diff(prepend=ends.new_zeros(1))
            counts.append((rows[-len(gate) :] > 0).sum())

    with routed(runner, count):
        run()
    return float(torch.stack(counts).float().mean())

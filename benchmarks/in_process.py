# SPDX-License-Identifier: Apache-2.0
"""Engine inside this process, whose steps can be timed.

Import this module before anything imports vllm, because it sets variables that vllm reads once.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

NUM_EVENTS = 512  # events for this many steps are created in advance; more are created when needed
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import harness  # isort: skip

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Threads of an earlier engine may hold locks, and a forked rank would wait for them.
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
harness.prepare()

import torch

from benchmarks.random_weights import randomise_rank

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True)
class Step:
    """Times and sizes of one denoising step of an engine.

    Attributes:
        started: time.perf_counter() at its start.
        num_rows: rows that it computed.
        num_sampled: number of these rows whose logits were computed.
        planned_ms: the planner's prediction of the time.
        step_ms: milliseconds from the first host instruction to the results on the host.
        device_ms: milliseconds between CUDA events around the step; None on the CPU.
    """

    num_requests: int
    started: float
    step_ms: float
    device_ms: float | None
    num_rows: int = 0
    num_sampled: int = 0
    planned_ms: float = 0.0

    @property
    def ended(self) -> float:
        """`time.perf_counter()` when the results were on the host."""
        return self.started + self.step_ms / 1000


@dataclass
class StepLog:
    """Log of the steps of a model runner while it is attached."""

    _raw: list[tuple[Step, tuple[Any, Any] | None]] = field(default_factory=list)

    @contextmanager
    def attached(self, runner: Any) -> Iterator[StepLog]:
        """Time every step of `runner` until the block ends."""
        launch, collect, on_cuda = runner.launch, runner.collect, runner.device.type == "cuda"
        launched: dict[float, tuple[float, tuple[Any, Any] | None]] = {}
        spare = _recorded_events(NUM_EVENTS if on_cuda else 0)  # creating an event takes time

        def timed_launch(req_ids: list[str]) -> Any:
            events = None
            if on_cuda:
                events = (spare or _recorded_events(1)).pop()
                events[0].record()
            started = time.perf_counter()
            step = launch(req_ids)
            if events:
                events[1].record()
            launched[step.started] = started, events
            return step

        def timed_collect(step: Any) -> Any:
            results = collect(step)
            ended = time.perf_counter()
            if step.started in launched:
                started, events = launched.pop(step.started)
                count, batch = len(step.req_ids), step.batch
                time_ms = 1000 * (ended - started)
                sizes, plan = (batch.num_rows, batch.num_sampled), step.memory.plan
                record = Step(count, started, time_ms, None, *sizes, 1000 * plan.predicted_seconds)
                self._raw.append((record, events))
            return results

        runner.launch, runner.collect = timed_launch, timed_collect
        try:
            yield self
        finally:
            del runner.launch, runner.collect

    def steps(self) -> list[Step]:
        """Return the collected steps; waits for the device."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return [
            replace(step, device_ms=events[0].elapsed_time(events[1])) if events else step
            for step, events in self._raw
        ]


def _recorded_events(count: int) -> list[tuple[Any, Any]]:
    """Make pairs of recorded events; the device creates an event when it is first recorded."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for event in chain(*pairs):
        event.record()
    return [(first, last) for first, last in pairs]


def seconds_of(steps: Sequence[Step]) -> float:
    """Return the seconds from the start of the first step to the end of the last."""
    return max(step.ended for step in steps) - min(step.started for step in steps)


def median_interval_ms(steps: Sequence[Step]) -> float:
    """Return the median time from the start of a step to that of the next, as a client waits."""
    starts = [step.started for step in steps]
    return 1000 * statistics.median(b - a for a, b in pairwise(starts))


def kernel_times(run: Callable[[], Sequence[Step]]) -> dict[str, tuple[float, float]]:
    """Return kernel name -> (milliseconds, launches) per step, for the steps that `run` returns.

    This covers the device's work as torch.profiler reports it, the longest kernel first; on the CPU
    the result is empty.
    """
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        num_steps = len(run())
    times: dict[str, tuple[float, float]] = {}
    for event in profiled.events():
        if event.device_type.name == "CUDA":
            time_ms, launches = times.get(event.name, (0.0, 0.0))
            time_ms += event.device_time_total / 1000 / num_steps
            times[event.name] = (time_ms, launches + 1 / num_steps)
    return dict(sorted(times.items(), key=lambda item: -item[1][0]))


def step_loop(llm: Any) -> Any:
    """Return the step loop of the only worker of an LLM."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.loop


@contextmanager
def engine(model: Path, *, dummy_weights: bool, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (LLM, model runner) of a checkpoint; its memory is free when the block ends.

    With several GPUs the runners are in other processes; then the runner is None.

    Args:
        dummy_weights: whether the checkpoint has no weights. They are then drawn from N(0, 0.02),
            because with other numbers a card needs another power and runs at another speed.
        settings: arguments of `vllm.LLM`.

    Raises:
        BenchmarkError: the model cannot be loaded.
    """
    from vllm import LLM

    # An earlier engine may still hold memory, if its caller kept its runner until now.
    free_memory()
    if dummy_weights:
        settings["load_format"] = "dummy"
    try:
        llm = LLM(model=str(model), disable_log_stats=True, **settings)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise harness.BenchmarkError(f"{model} cannot be loaded: {reason}") from error
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    worker = getattr(executor, "driver_worker", None)
    runner = None if worker is None else worker.worker.model_runner
    try:
        if dummy_weights:
            llm.collective_rpc(randomise_rank)
        yield llm, runner
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm, executor, worker, runner
        free_memory()


@contextmanager
def engine_of(options: argparse.Namespace, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """Run `engine` with the model that the options of `harness.Parser.shape` select."""
    dummy_weights = getattr(options, "model", None) is None
    settings["dtype"] = options.dtype
    with (
        harness.checkpoint_of(options) as folder,
        engine(folder, dummy_weights=dummy_weights, **settings) as checkpoint,
    ):
        yield checkpoint


def free_memory() -> None:
    """Return unused memory to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_requests(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    parameters: dict[str, Any],
    adapters: Sequence[Any] | None = None,
) -> list[Any]:
    """Send all prompts together and return their outputs when the last one is complete.

    Args:
        parameters: parameters of a request; the whole canvas is returned, even behind stop tokens.
        adapters: upstream's `LoRARequest` of each request, or None.

    Raises:
        BenchmarkError: a request failed.
    """
    inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    sampling = harness.sampling_of(parameters)
    named = None if adapters is None else list(adapters)
    outputs: list[Any] = llm.generate(inputs, sampling, use_tqdm=False, lora_request=named)
    for output in outputs:
        harness.report_of(output)
    return outputs


def timed_steps(
    llm: Any,
    runner: Any,
    prompts: Sequence[Sequence[int]],
    parameters: dict[str, Any],
    adapters: Sequence[Any] | None = None,
) -> list[Step]:
    """Run `run_requests`; return its steps in the order of their starts.

    Without a runner, these are the steps of the first rank, which runs in another process.
    """
    if runner is None:
        llm.collective_rpc(start_log)
        run_requests(llm, prompts, parameters, adapters)
        steps = llm.collective_rpc(end_log)[0]
    else:
        with StepLog().attached(runner) as log:
            run_requests(llm, prompts, parameters, adapters)
        steps = log.steps()
    return sorted(steps, key=lambda step: step.started)


def start_log(worker: Any) -> None:
    """Time the steps of an engine's worker from now on."""
    worker.timing = ExitStack()
    worker.step_log = worker.timing.enter_context(StepLog().attached(worker.worker.model_runner))


def end_log(worker: Any) -> list[Step]:
    """Return the steps since `start_log`, and time no more."""
    worker.timing.close()
    steps: list[Step] = worker.step_log.steps()
    return steps


def random_prompts(count: int, num_tokens: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return `count` prompts of `random_prompt`, each with another seed."""
    return [random_prompt(num_tokens, vocab_size, seed + i) for i in range(count)]


def random_prompt(num_tokens: int, vocab_size: int, seed: int) -> list[int]:
    """Draw ids of ordinary tokens; in released models special tokens have the first or last ids."""
    generator = torch.Generator().manual_seed(seed)
    bounds = vocab_size // 8, vocab_size // 2
    ids: list[int] = torch.randint(*bounds, (num_tokens,), generator=generator).tolist()
    return ids

# SPDX-License-Identifier: Apache-2.0
"""An engine inside the test process, and the reference loops behind the same request."""

import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.checkpoints import EOS_ID, EOT_ID
from tests.reference.decode import LogitModel
from tests.reference.golden import Run, clear_case
from vllm.diffusion.config import Settings
from vllm.diffusion.engine.messages import StepUsage
from vllm.diffusion.engine.scheduler.long_step_policy import LongStepPolicy
from vllm.diffusion.memory.plan import Plan

STOP_IDS = frozenset({EOS_ID, EOT_ID})
MAX_MODEL_LEN = 256
POOL_BYTES = 256 << 20
BLOCKS: dict[str, Any] = {"gen_length": 32, "block_length": 8, "steps": 16}
# Tests count steps and forwards: how slow the machine is must not decide which are cut, nor whether
# it has a GPU.
DETERMINISTIC: dict[str, Any] = {"dllm": {"longest_pause_ms": 0, "num_speculative_states": 0}}
# The canvas is short where the reference draws noise: its generator is plain Python.
NOISY: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8, "seed": 7}


@dataclass(frozen=True)
class Request:
    """A request: prompt ids, diffusion parameters, and fields of SamplingParams."""

    prompt: list[int]
    extra: dict[str, Any]
    sampling: dict[str, Any] = field(default_factory=dict)


def uncached(one: Request) -> Request:
    """Return the request with nothing kept: every forward computes all that is seen."""
    return Request(one.prompt, {**one.extra, "cache": "none"}, one.sampling)


@dataclass(frozen=True)
class Response:
    """What came back. `num_forwards` is None when the request did not end by itself."""

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    report: dict[str, Any]

    @property
    def num_forwards(self) -> int | None:
        return self.report.get("num_forwards")

    @property
    def num_steps(self) -> int | None:
        """Forwards of a loop that takes one step at a time; fewer may serve them."""
        return self.report.get("num_steps")


class Engine:
    """A `vllm.LLM` whose engine core and worker live in this process."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        from vllm import LLM

        self.llm = LLM(
            **{
                "model": str(folder),
                "dtype": "float32",
                "max_model_len": MAX_MODEL_LEN,
                "disable_log_stats": True,
                "additional_config": DETERMINISTIC,
                **settings,
            }
        )

    def ask(self, *asks: Request) -> list[Response]:
        """Run the requests together; answers in the order of the requests."""
        return [to_answer(output) for output in self.outputs(*asks)]

    def outputs(self, *asks: Request) -> list[Any]:
        """Run the requests together; upstream's outputs, with all answers and logprobs."""
        answer: list[Any] = self.llm.generate(
            [{"prompt_token_ids": list(ask.prompt)} for ask in asks],
            [sampling_params(ask) for ask in asks],
            use_tqdm=False,
        )
        return answer

    @property
    def core(self) -> Any:
        """Upstream's EngineCore."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def loop(self) -> Any:
        return self.core.model_executor.driver_worker.worker.loop

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    def cut_steps(self, longest_pause_s: float) -> None:
        """Compute steps in slices, from now on, that take longer than others may wait."""
        settings = Settings(longest_pause_ms=1000 * longest_pause_s)
        self.scheduler.long_steps = LongStepPolicy(settings)

    def is_idle(self) -> bool:
        """No request and no canvas is left over."""
        self.llm.llm_engine.step()  # the workers hear of finished requests in the next message
        return not self.scheduler.has_requests() and not self.runner.canvases


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Engine]:
    """An engine that is gone, process groups and all, when the block ends."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **small_pool()}
    if torch.distributed.is_initialized():  # forked ranks would have the groups of another engine
        from vllm.envs import disable_envs_cache

        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        disable_envs_cache()  # that engine has made upstream remember what it was
    from vllm.distributed.device_communicators import shm_broadcast

    # Who waits for another process must not keep a core from it.
    waits = mock.patch.object(shm_broadcast, "sched_yield", lambda: time.sleep(1e-3))
    with mock.patch.dict(os.environ, environment), waits, models_inspected_here():
        yield from _running(folder, settings)


def small_pool() -> dict[str, str]:
    """The variable for a pool on the CPU whose pages are made in no time."""
    name = "VLLM_ACTIVATION_POOL_SIZE_BYTES"
    is_given = name in os.environ or torch.cuda.is_available()
    return {} if is_given else {name: str(POOL_BYTES)}


def models_inspected_here() -> AbstractContextManager[Any]:
    """Upstream looks at a model of its own in this process, and starts none that imports it all."""
    from vllm.model_executor.models import registry

    return mock.patch.object(registry, "_run_in_subprocess", lambda look: look())


def _running(folder: Path, settings: dict[str, Any]) -> Iterator[Engine]:
    torch.set_num_threads(1)  # many threads on tiny matrices only wait for each other
    with quick():
        engine = Engine(folder, **settings)
    try:
        yield engine
    finally:
        with quick():
            engine.llm.llm_engine.engine_core.shutdown()
        del engine.llm
        gc.collect()
        freeze_caches()


@contextmanager
def quick() -> Iterator[None]:
    """Without upstream's six collections of garbage, slower than all else, and without freezes."""
    freeze_imports()
    with (
        mock.patch.object(gc, "collect"),
        mock.patch.object(gc, "freeze"),
        mock.patch.object(gc, "unfreeze"),
    ):
        yield


@cache
def freeze_imports() -> None:
    """The collector need not look at upstream's modules after every engine."""
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine

    import vllm.diffusion.engine.worker.worker  # noqa: F401

    gc.collect()
    gc.freeze()


@cache
def freeze_caches() -> None:
    """The collector need not look at what upstream keeps from the first engine, either."""
    gc.freeze()


def shrink(runner: Any, budget_bytes: int) -> None:
    """Give a model runner a smaller pool."""
    from vllm.diffusion.engine.worker.pool_budget import planning_budget
    from vllm.diffusion.memory import Planner

    planner = runner.planner
    runner.pool.budget_bytes = budget_bytes
    runner.planner = Planner(planner.shape, planning_budget(budget_bytes), planner.row_budget)


def sampling_params(ask: Request) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "extra_args": ask.extra, **ask.sampling})


def to_answer(output: Any) -> Response:
    completion = output.outputs[0]
    return Response(
        token_ids=list(completion.token_ids),
        text=completion.text,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        report=(output.kv_transfer_params or {}).get("dllm", {}),
    )


def start(engine: Engine, name: str, ask: Request) -> str:
    """Queue a request; returns the engine's own id of it."""
    prompt: Any = {"prompt_token_ids": ask.prompt}
    req_id = str(engine.llm.llm_engine.add_request(name, prompt, sampling_params(ask)))
    if engine.scheduler.last_usage is None:  # a first step tells only what memory there is
        engine.llm.llm_engine.step()
    return req_id


def step(engine: Engine) -> dict[str, Response]:
    """The answers that ended in one step, by name."""
    return {o.request_id: to_answer(o) for o in engine.llm.llm_engine.step() if o.finished}


def finish(engine: Engine) -> dict[str, Response]:
    """Step until all requests have ended; their answers by name."""
    answers: dict[str, Response] = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        answers |= step(engine)
    return answers


def as_request(prompt: list[int], ignore_eos: bool = True, **parameters: Any) -> Request:
    """The same parameters as a reference run takes; by default for the whole canvas."""
    return Request(prompt, {"ignore_eos": ignore_eos, **parameters})


def clear_cases(
    model: LogitModel, table: Sequence[tuple[int, dict[str, Any]]]
) -> tuple[list[Request], list[Run]]:
    """Requests of prompt lengths and parameters, and what the reference makes of them."""
    cases = [(clear_case(model, length, **parameters), parameters) for length, parameters in table]
    asks = [as_request(prompt, **parameters) for (prompt, _), parameters in cases]
    return asks, [wanted for (_, wanted), _ in cases]


def speculating(asks: Iterable[Request], most: int) -> list[Request]:
    """The same requests, with so many drafts a forward."""
    return [
        Request(a.prompt, {**a.extra, "num_speculative_states": most}, a.sampling) for a in asks
    ]


def record(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]
) -> list[Any]:
    """A list of what `note` makes of every call's result and arguments, from now on."""
    results: list[Any] = []
    function = getattr(owner, name)

    def recorded(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        results.append(note(result, *arguments))
        return result

    monkeypatch.setattr(owner, name, recorded)
    return results


def rows_of_launches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that takes the rows of every step from now on."""
    return record(monkeypatch, engine.runner, "launch", lambda step, _: step.batch.num_rows)


def assert_parity(
    engine: Engine, model: LogitModel, prompt_length: int, parameters: dict[str, Any]
) -> None:
    """A request of `parameters` gives the reference's canvas with as many forwards."""
    prompt, wanted = clear_case(model, prompt_length, **parameters)
    (answer,) = engine.ask(as_request(prompt, **parameters))
    assert_alike(answer, wanted)


def assert_alike(answer: Response, wanted: Run) -> None:
    """The answer is the reference's canvas, with a step for each of its forwards."""
    both = zip(answer.token_ids, wanted.ids, wanted.decided_at, strict=False)
    differ = [step for actual, token, step in both if actual != token]
    assert answer.token_ids == wanted.ids, f"first difference at forward {min(differ, default=0)}"
    assert answer.num_steps == wanted.num_forwards
    assert answer.finish_reason == "length"


def refusal_error() -> Any:
    """What upstream turns into a 400."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError


def assert_decoded(answers: Sequence[Response], wanted: Sequence[Run]) -> None:
    actual = [(a.token_ids, a.num_steps, a.finish_reason) for a in answers]
    assert actual == [(w.ids, w.num_forwards, "length") for w in wanted]


def record_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The requests of every step from now on."""
    return record(monkeypatch, engine.runner, "launch", lambda _, req_ids: list(req_ids))


def tokens(answers: list[Response]) -> list[tuple[list[int], int | None]]:
    return [(answer.token_ids, answer.num_forwards) for answer in answers]


def record_plans(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, StepUsage]]:
    """The plan and the measured memory of every step from now on."""
    results: list[tuple[Plan, StepUsage]] = []
    planned = record(monkeypatch, engine.runner.planner, "plan", lambda plan, *_: plan)
    execute = engine.loop.execute

    def recording_execute(message: Any) -> Any:
        output = execute(message)
        if output.results:
            results.append((planned[-1], output.usage))
        return output

    monkeypatch.setattr(engine.loop, "execute", recording_execute)
    return results


def engine_config(folder: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=64, **arguments)
    with models_inspected_here():
        return args.create_engine_config()


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelno, record.getMessage()))


def logged(logger: logging.Logger, *call: Any) -> list[tuple[int, str]]:
    """Levels and texts of what a call logs."""
    function, *given = call
    lines, level = Lines(), logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)  # whatever the environment says of all loggers
    try:
        function(*given)
    finally:
        logger.setLevel(level)
        logger.removeHandler(lines)
    return lines.found

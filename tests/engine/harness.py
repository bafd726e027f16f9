# SPDX-License-Identifier: Apache-2.0
"""An engine inside the test process, and the reference loops for the same requests."""

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
from reference.decode import LogitModel

from tests.checkpoints import EOS_ID, EOT_ID
from tests.golden import Run, clear_case
from vllm.diffusion.config import Settings
from vllm.diffusion.engine.messages import StepUsage
from vllm.diffusion.engine.scheduler.long_step_policy import LongStepPolicy
from vllm.diffusion.memory.plan import Plan

STOP_IDS = frozenset({EOS_ID, EOT_ID})
MAX_MODEL_LEN = 256
POOL_BYTES = 256 << 20
BLOCKS: dict[str, Any] = {"gen_length": 32, "block_length": 8, "steps": 16}
# Tests count steps and forward passes. The speed of the machine must not decide which steps are
# sliced, and the number of drafts must not depend on whether there is a GPU.
DETERMINISTIC: dict[str, Any] = {"dllm": {"longest_pause_ms": 0, "num_speculative_states": 0}}
# The canvas is short where the reference draws noise, because its generator is plain Python.
NOISY: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8, "seed": 7}


@dataclass(frozen=True)
class Request:
    """A request: prompt ids, diffusion parameters, and fields of SamplingParams."""

    prompt: list[int]
    extra: dict[str, Any]
    sampling: dict[str, Any] = field(default_factory=dict)


def uncached(one: Request) -> Request:
    """Return the request without a cache: every forward pass computes all visible positions."""
    return Request(one.prompt, {**one.extra, "cache": "none"}, one.sampling)


@dataclass(frozen=True)
class Response:
    """The response to a request. `num_forwards` is None if the request was ended from outside."""

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
        """Denoising steps of a loop without drafts; with drafts, fewer forward passes suffice."""
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
        """Run the requests together and return the responses in the same order."""
        return [to_answer(output) for output in self.outputs(*asks)]

    def outputs(self, *asks: Request) -> list[Any]:
        """Run the requests together and return upstream's outputs with all choices and logprobs."""
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
        """From now on, compute a step in slices if it would delay others by `longest_pause_s`."""
        settings = Settings(longest_pause_ms=1000 * longest_pause_s)
        self.scheduler.long_steps = LongStepPolicy(settings)

    def is_idle(self) -> bool:
        """Return whether no request and no canvas is left over."""
        # The workers receive the names of finished requests with the next message.
        self.llm.llm_engine.step()
        return not self.scheduler.has_requests() and not self.runner.canvases


@contextmanager
def running(folder: Path, **settings: Any) -> Iterator[Engine]:
    """Start an engine and shut it down, with its process groups, when the block ends."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **small_pool()}
    if torch.distributed.is_initialized():
        # Forked ranks would inherit the process groups of the engine that runs here.
        from vllm.envs import disable_envs_cache

        environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        disable_envs_cache()  # the running engine has made upstream cache the variables
    from vllm.distributed.device_communicators import shm_broadcast

    # A process that waits for another one must not occupy the core that the other one needs.
    waits = mock.patch.object(shm_broadcast, "sched_yield", lambda: time.sleep(1e-3))
    with mock.patch.dict(os.environ, environment), waits, models_inspected_here():
        yield from _running(folder, settings)


def small_pool() -> dict[str, str]:
    """Return the variable for a pool on the CPU that is small enough to be made at once."""
    name = "VLLM_ACTIVATION_POOL_SIZE_BYTES"
    is_given = name in os.environ or torch.cuda.is_available()
    return {} if is_given else {name: str(POOL_BYTES)}


def models_inspected_here() -> AbstractContextManager[Any]:
    """Make upstream inspect a model in this process, instead of one that imports everything."""
    from vllm.model_executor.models import registry

    return mock.patch.object(registry, "_run_in_subprocess", lambda look: look())


def _running(folder: Path, settings: dict[str, Any]) -> Iterator[Engine]:
    torch.set_num_threads(1)  # more threads only wait for each other on tiny matrices
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
    """Disable the garbage collections and freezes of upstream, which take most of a start."""
    freeze_imports()
    with (
        mock.patch.object(gc, "collect"),
        mock.patch.object(gc, "freeze"),
        mock.patch.object(gc, "unfreeze"),
    ):
        yield


@cache
def freeze_imports() -> None:
    """Exclude upstream's modules from garbage collection, which runs after every engine."""
    import vllm.v1.engine.core
    import vllm.v1.engine.llm_engine

    import vllm.diffusion.engine.worker.worker  # noqa: F401

    gc.collect()
    gc.freeze()


@cache
def freeze_caches() -> None:
    """Exclude the objects that upstream caches for the first engine from garbage collection."""
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
    """Queue a request and return its id in the engine."""
    prompt: Any = {"prompt_token_ids": ask.prompt}
    req_id = str(engine.llm.llm_engine.add_request(name, prompt, sampling_params(ask)))
    if engine.scheduler.last_usage is None:  # the first step only reports the memory
        engine.llm.llm_engine.step()
    return req_id


def step(engine: Engine) -> dict[str, Response]:
    """Run one step and return the responses that ended in it, by name."""
    return {o.request_id: to_answer(o) for o in engine.llm.llm_engine.step() if o.finished}


def finish(engine: Engine) -> dict[str, Response]:
    """Step until all requests have ended, and return their responses by name."""
    answers: dict[str, Response] = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        answers |= step(engine)
    return answers


def as_request(prompt: list[int], ignore_eos: bool = True, **parameters: Any) -> Request:
    """Return a request with the parameters of a reference run, by default for the whole canvas."""
    return Request(prompt, {"ignore_eos": ignore_eos, **parameters})


def clear_cases(
    model: LogitModel, table: Sequence[tuple[int, dict[str, Any]]]
) -> tuple[list[Request], list[Run]]:
    """Return requests for pairs of prompt length and parameters, and their reference runs."""
    cases = [(clear_case(model, length, **parameters), parameters) for length, parameters in table]
    asks = [as_request(prompt, **parameters) for (prompt, _), parameters in cases]
    return asks, [wanted for (_, wanted), _ in cases]


def speculating(asks: Iterable[Request], most: int) -> list[Request]:
    """Return the same requests with up to `most` drafts per forward pass."""
    return [
        Request(a.prompt, {**a.extra, "num_speculative_states": most}, a.sampling) for a in asks
    ]


def record(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]
) -> list[Any]:
    """Return a list that receives `note(result, *arguments)` for every later call."""
    results: list[Any] = []
    function = getattr(owner, name)

    def recorded(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        results.append(note(result, *arguments))
        return result

    monkeypatch.setattr(owner, name, recorded)
    return results


def rows_of_launches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of rows of every later step."""
    return record(monkeypatch, engine.runner, "launch", lambda step, _: step.batch.num_rows)


def assert_parity(
    engine: Engine, model: LogitModel, prompt_length: int, parameters: dict[str, Any]
) -> None:
    """Check that a request with `parameters` gives the reference's canvas and number of steps."""
    prompt, wanted = clear_case(model, prompt_length, **parameters)
    (answer,) = engine.ask(as_request(prompt, **parameters))
    assert_alike(answer, wanted)


def assert_alike(answer: Response, wanted: Run) -> None:
    """Check that the response is the reference's canvas, with one step per forward pass of it."""
    both = zip(answer.token_ids, wanted.ids, wanted.decided_at, strict=False)
    differ = [step for actual, token, step in both if actual != token]
    assert answer.token_ids == wanted.ids, f"first difference at forward {min(differ, default=0)}"
    assert answer.num_steps == wanted.num_forwards
    assert answer.finish_reason == "length"


def num_cached(engine: Engine, one: Request) -> int:
    """Return the number of prompt tokens whose keys and values were reused."""
    (output,) = engine.outputs(one)
    return int(output.num_cached_tokens)


def refusal_error() -> Any:
    """Return the exception that upstream turns into status 400."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError


def assert_decoded(answers: Sequence[Response], wanted: Sequence[Run]) -> None:
    actual = [(a.token_ids, a.num_steps, a.finish_reason) for a in answers]
    assert actual == [(w.ids, w.num_forwards, "length") for w in wanted]


def record_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that receives the ids of the requests in every later step."""
    return record(monkeypatch, engine.runner, "launch", lambda _, req_ids: list(req_ids))


def tokens(answers: list[Response]) -> list[tuple[list[int], int | None]]:
    return [(answer.token_ids, answer.num_forwards) for answer in answers]


def record_plans(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Plan, StepUsage]]:
    """Return a list that receives the plan and the measured memory of every later step."""
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
        self.messages: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append((record.levelno, record.getMessage()))


def logged(logger: logging.Logger, *call: Any) -> list[tuple[int, str]]:
    """Return the levels and texts of the messages that a call logs."""
    function, *given = call
    lines, level = Lines(), logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)  # regardless of the level that the environment sets
    try:
        function(*given)
    finally:
        logger.setLevel(level)
        logger.removeHandler(lines)
    return lines.messages

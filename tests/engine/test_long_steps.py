# SPDX-License-Identifier: Apache-2.0
"""Long steps in slices, between the steps of short requests, change no token and free memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint, random_prompt
from tests.engine.cases import CUT, PLANS, SHORT
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    finish,
    record,
    running,
    shrink,
    start,
    step,
    tokens,
)
from vllm.diffusion.engine.long_steps import LongSteps, StepSlice
from vllm.diffusion.engine.scheduler.long_step_policy import LongStepPolicy, SpeedEstimate
from vllm.diffusion.engine.worker.long_step_runner import LongStepRunner
from vllm.diffusion.engine.worker.reuse import ALL_ROWS
from vllm.diffusion.memory import Admission, Demand, PoolExhaustedError, StepShape, rates
from vllm.diffusion.memory.plan import Plan, StageSeconds

LONG = Request(random_prompt(90, 1), {**SHORT, "cfg_scale": 1.0})
BESIDE = [Request(random_prompt(n, n), SHORT) for n in (20, 5, 33)]
Alone = tuple["Engine", list[tuple[list[int], "int | None"]]]  # an engine and its answers
SECOND = StageSeconds(1.0, 1.0, 1.0, 1.0)  # seconds per chunk


def paused_in(output: Any) -> Any:
    """Return the `PausedStep` after a step of the engine, or None."""
    return None if output.long_steps is None else output.long_steps.paused


class Slicer:
    """Makes the scheduler of an engine name slices for the requests of `long`."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.runner, self.seconds = engine.runner, seconds
        self.long: set[str] = set()
        self.outputs: list[Any] = []
        self._execute = engine.loop.execute
        monkeypatch.setattr(engine.loop, "execute", self.execute)

    def execute(self, message: Any) -> Any:
        named = [req_id for req_id in message.num_scheduled_tokens if req_id in self.long]
        step_slice = StepSlice(named[0], ALL_ROWS, self.seconds) if named else None
        for req_id in named[1:]:
            del message.num_scheduled_tokens[req_id]  # one long request at a time
        changed = replace(message, long_steps=LongSteps(tuple(self.long), step_slice))
        self.outputs.append(self._execute(changed))
        return self.outputs[-1]

    @property
    def paused(self) -> list[Any]:
        return [paused for output in self.outputs if (paused := paused_in(output)) is not None]


@pytest.fixture(scope="module")
def alone(
    checkpoint: Callable[[str], Any],
) -> Iterator[Alone]:
    """Start an engine; its answers without slices are of the long request, then of the others."""
    settings = {"max_model_len": 2048, "max_num_batched_tokens": 4096}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
        with running(checkpoint("gqa"), **settings) as engine:
            yield engine, [tokens(engine.ask(ask))[0] for ask in (LONG, *BESIDE)]


def slice_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float, plan: Plan = CUT
) -> Slicer:
    """Plan steps with chunks of one second, and cut them into slices of `seconds`."""
    sliced = replace(plan, chunk_seconds=SECOND)
    monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: sliced)
    return Slicer(engine, monkeypatch, seconds)


def run_beside(engine: Engine, slicer: Slicer) -> list[tuple[list[int], int | None]]:
    """Run the long request in slices and the other requests as usual, and return all answers."""
    slicer.long = {start(engine, "long", LONG)}
    engine.llm.llm_engine.step()
    for number, ask in enumerate(BESIDE):
        start(engine, f"short {number}", ask)
        engine.llm.llm_engine.step()
    answers = finish(engine)
    names = ["long", *(f"short {number}" for number in range(len(BESIDE)))]
    return tokens([answers[name] for name in names])


@pytest.mark.parametrize(
    ("plan", "runs_ahead"),
    [(plan, number % 2 == 1) for number, plan in enumerate(PLANS.values())],
    ids=PLANS,
)
def test_slices_beside_other_requests_give_the_same_tokens(
    plan: Plan,
    runs_ahead: bool,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slices keep tokens with chunks, head groups and host memory, despite shared buffer names."""
    engine, wanted = alone
    monkeypatch.setattr(engine.loop, "runs_ahead", runs_ahead)
    slicer = slice_steps(engine, monkeypatch, 3.0, plan)
    assert run_beside(engine, slicer) == wanted
    assert len(slicer.paused) >= 4
    assert all(paused.held_bytes > 0 for paused in slicer.paused)
    assert engine.is_idle()
    assert engine.runner.pool.used_bytes == engine.runner.caches.reserved_bytes


def test_a_slice_is_as_much_work_as_was_asked_for(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, wanted = alone
    counts = []
    for seconds in (1.0, 2.5, 5.0, 1000.0):
        with monkeypatch.context() as sliced:
            slicer = slice_steps(engine, sliced, seconds)
            slicer.long = {start(engine, "long", LONG)}
            assert tokens([finish(engine)["long"]]) == wanted[:1]
            counts.append(len([output for output in slicer.outputs if output.req_ids]))
    num_forwards = wanted[0][1]
    one, two, five, whole = (count / num_forwards for count in counts)
    assert whole == 1
    assert (two, five) == (pytest.approx(one / 2, abs=1), pytest.approx(one / 5, abs=1))


@pytest.mark.parametrize("name", ["chunks, queries kept", "2 head groups, rows in host memory"])
def test_an_abort_in_mid_step_gives_its_memory_back_at_once(
    name: str,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = alone
    stays = Request(random_prompt(20), {**SHORT, "steps": 16})
    wanted = tokens(engine.ask(stays))
    slicer = slice_steps(engine, monkeypatch, 2.0, PLANS[name])
    runner = engine.runner
    before = runner.pool.used_bytes
    aborted = start(engine, "aborted", LONG)
    slicer.long = {aborted}
    start(engine, "stays", stays)
    for num_steps in (1, 2, 3):
        engine.llm.llm_engine.step()
        assert len(slicer.paused) == num_steps
    assert runner.pool.used_bytes > before
    engine.llm.llm_engine.abort_request([aborted], internal=True)
    engine.llm.llm_engine.step()
    assert paused_in(slicer.outputs[-1]) is None
    assert runner.pool.used_bytes == before
    assert tokens([finish(engine)["stays"]]) == wanted
    assert engine.is_idle()


def test_what_runs_beside_a_paused_step_comes_out_of_what_is_left(
    alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The long step alone would fill the pool.

    The other step is planned with the remaining bytes.
    """
    engine, _ = alone
    runner = engine.runner
    long, short = Request(random_prompt(1500), SHORT), Request(random_prompt(300), SHORT)
    wanted = tokens([*engine.ask(long), *engine.ask(short)])
    step_alone = StepShape(1516, 16, 1516)
    whole = runner.planner.plan(step_alone)
    monkeypatch.setattr(runner.pool, "budget_bytes", whole.predicted_peak_bytes)
    monkeypatch.setattr(runner, "planner", runner.planner)
    shrink(runner, whole.predicted_peak_bytes)
    plans = record(monkeypatch, runner.planner, "plan", lambda plan, step, *_: (step.rows, plan))
    seconds = runner.planner.plan(step_alone).predicted_seconds / 20
    slicer = Slicer(engine, monkeypatch, seconds)
    slicer.long = {start(engine, "long", long)}
    engine.llm.llm_engine.step()
    start(engine, "short", short)
    answers = finish(engine)
    assert tokens([answers["long"], answers["short"]]) == wanted
    assert len(slicer.paused) >= 10
    held = max(paused.held_bytes for paused in slicer.paused)
    assert max(plan.predicted_peak_bytes for rows, plan in plans if rows == 316) > held
    peaks = [output.usage.peak_bytes for output in slicer.outputs]
    assert held < max(peaks) <= runner.pool.budget_bytes
    assert engine.is_idle()


@pytest.mark.parametrize(
    ("error", "times", "reason"),
    [
        (RuntimeError("the device broke"), 1, "the device broke"),
        (PoolExhaustedError("gate_up", 2, 1), 1, None),
        (PoolExhaustedError("gate_up", 2, 1), 2, "PoolExhaustedError"),
    ],
    ids=["a failure", "out of memory", "out of memory again"],
)
def test_a_slice_that_fails_ends_its_request_alone(
    error: Exception,
    times: int,
    reason: str | None,
    alone: Alone,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that runs out of memory is repeated once; at the second failure its request ends."""
    engine, wanted = alone
    slicer = slice_steps(engine, monkeypatch, 2.0)
    layer = engine.runner.model.layers[1]
    feed_forward, failures = layer.mlp_stage.feed_forward, []

    def fail_in_slices(*arguments: Any) -> Any:
        if engine.runner.pool.has_frame and len(slicer.paused) > 4 and len(failures) < times:
            failures.append(error)
            raise error
        return feed_forward(*arguments)

    monkeypatch.setattr(layer, "mlp_stage", SimpleNamespace(feed_forward=fail_in_slices))
    slicer.long = {start(engine, "long", LONG)}
    answer = finish(engine)["long"]
    assert len(failures) == times
    if reason is None:
        assert tokens([answer]) == wanted[:1]
    else:
        assert reason in answer.report["error"]
    assert engine.is_idle()
    assert engine.runner.pool.used_bytes == engine.runner.caches.reserved_bytes
    monkeypatch.undo()
    assert tokens(engine.ask(BESIDE[0])) == wanted[1:2]


# ---- slices chosen by the scheduler ----


@pytest.fixture
def slow(
    checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, list[Any]]]:
    """Start an engine whose planner expects a slow device; return it with its step outputs."""
    slow = rates.CPU._replace(product_flops=1e8, attention_flops=1e8, launch_seconds=4e-6)
    monkeypatch.setattr(rates, "CPU", slow)
    monkeypatch.setattr(SpeedEstimate, "learn", lambda *_: None)
    with running(checkpoint("mha")) as engine:
        yield engine, record(monkeypatch, engine.loop, "execute", lambda output, _: output)


@pytest.mark.parametrize(("cache", "runs_ahead"), [("none", False), ("dual", True)])
def test_the_scheduler_hands_out_long_steps_in_slices(
    cache: str,
    runs_ahead: bool,
    slow: tuple[Engine, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two long requests take turns, a step each, while other requests step in between."""
    engine, outputs = slow
    monkeypatch.setattr(engine.loop, "runs_ahead", runs_ahead)
    step_slice = {**SHORT, "cache": cache}
    asks = [Request(random_prompt(n, n), step_slice) for n in (200, 15, 180, 8)]
    wanted = tokens(engine.ask(*asks))
    assert all(paused_in(output) is None for output in outputs)
    planner = engine.runner.planner
    seconds = Admission(planner).seconds_of(Demand(216, 16), 216) / 5
    assert Admission(planner).seconds_of(Demand(31, 16), 31) < seconds
    outputs.clear()
    engine.cut_steps(2 * seconds)
    assert tokens(engine.ask(*asks)) == wanted
    paused = [paused_in(output).req_id for output in outputs if paused_in(output) is not None]
    assert len(set(paused)) == 2
    assert len(paused) >= 10
    beside = [output for output in outputs if paused_in(output) is not None and output.results]
    assert len(beside) >= 3
    assert engine.is_idle()
    assert engine.runner.pool.used_bytes == engine.runner.caches.reserved_bytes


def test_an_abort_between_slices_ends_the_step(slow: tuple[Engine, list[Any]]) -> None:
    engine, outputs = slow
    long, short = (
        Request(random_prompt(200), SHORT),
        Request(random_prompt(15), {**SHORT, "steps": 16}),
    )
    wanted = tokens(engine.ask(short))
    before = engine.runner.pool.used_bytes
    engine.cut_steps(2 * Admission(engine.runner.planner).seconds_of(Demand(216, 16), 216) / 5)
    aborted = start(engine, "long", long)
    for _ in range(3):
        engine.llm.llm_engine.step()
    start(engine, "short", short)
    engine.llm.llm_engine.step()
    assert paused_in(outputs[-1]).req_id == aborted
    assert outputs[-1].results.keys() == {*outputs[-1].req_ids} - {aborted}
    engine.llm.llm_engine.abort_request([aborted], internal=True)
    engine.llm.llm_engine.step()
    assert engine.runner.pool.used_bytes == before
    assert tokens([finish(engine)["short"]]) == wanted
    assert engine.is_idle()


def test_who_does_not_fit_beside_a_paused_step_waits_for_its_end(
    slow: tuple[Engine, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, outputs = slow
    planner = engine.runner.planner
    long, short = Request(random_prompt(200), SHORT), Request(random_prompt(15), SHORT)
    wanted = tokens(engine.ask(long, short))
    engine.cut_steps(2 * Admission(planner).seconds_of(Demand(216, 16), 216) / 5)
    fits = Admission.fits

    def in_a_full_pool(admission: Admission, step: StepShape, kept_bytes: int = 0) -> bool:
        return kept_bytes == 0 and fits(admission, step)

    monkeypatch.setattr(Admission, "fits", in_a_full_pool)
    outputs.clear()
    assert tokens(engine.ask(long, short)) == wanted
    during = [after for before, after in pairwise(outputs) if paused_in(before) is not None]
    assert len(during) >= 8
    assert all(len(output.req_ids) == 1 for output in during)


def test_a_step_whose_keys_were_moved_begins_anew(
    slow: tuple[Engine, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step begins again after its pages moved, because a request ended and another one came."""
    engine, _ = slow
    step_slice = {**SHORT, "cache": "dual"}
    asks = [Request(random_prompt(n, n), step_slice) for n in (15, 200, 60)]
    wanted = tokens(engine.ask(*asks))
    runner = engine.runner
    runner.pages.trim()  # no page is free now
    engine.cut_steps(2 * Admission(runner.planner).seconds_of(Demand(216, 16), 216) / 30)
    forwards_begun = record(
        monkeypatch, LongStepRunner, "begin", lambda *call: call[2].num_forwards
    )
    names: list[str] = []
    monkeypatch.setattr(
        LongStepPolicy, "long", lambda _, running, *__: [n for n in names if n in running]
    )
    first = start(engine, "first", asks[0])
    step(engine)
    names.append(start(engine, "long", asks[1]))
    answers = {}
    while first in runner.canvases:
        answers |= step(engine)
    assert forwards_begun == [0]
    start(engine, "last", asks[2])
    answers |= finish(engine)
    assert tokens([answers[name] for name in ("first", "long", "last")]) == wanted
    assert forwards_begun.count(0) == 2
    assert engine.is_idle()


def test_a_paused_step_makes_room_for_who_starts(
    slow: tuple[Engine, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused step begins again if the pages of a new request need its memory; none fails."""
    engine, _ = slow
    cached = {**SHORT, "cache": "dual"}
    asks = [Request(random_prompt(200, 1), SHORT), Request(random_prompt(60, 2), cached)]
    wanted, runner = tokens(engine.ask(*asks)), engine.runner
    engine.cut_steps(2 * Admission(runner.planner).seconds_of(Demand(216, 16), 216) / 30)
    forwards_begun = record(
        monkeypatch, LongStepRunner, "begin", lambda *call: call[2].num_forwards
    )
    allocate = runner.pages.allocate

    def allocate_alone(*arguments: Any) -> Any:
        if runner.pool.has_frame:
            raise PoolExhaustedError("kept keys and values", 10, 5)
        return allocate(*arguments)

    monkeypatch.setattr(runner.pages, "allocate", allocate_alone)
    names = [start(engine, "long", asks[0])]
    monkeypatch.setattr(
        LongStepPolicy, "long", lambda _, running, *__: [n for n in names if n in running]
    )
    for _ in range(3):
        step(engine)
    assert runner.pool.has_frame
    start(engine, "kept", asks[1])
    answers = finish(engine)
    assert forwards_begun.count(0) == 2
    assert tokens([answers["long"], answers["kept"]]) == wanted
    assert engine.is_idle()


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("use_vmm", ["0", "1"])
def test_slices_on_a_gpu_give_the_same_tokens(
    use_vmm: str, checkpoint: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams, pinned memory and steps launched before a slice's result do not change tokens."""
    monkeypatch.setenv("VLLM_USE_VMM", use_vmm)
    with running(checkpoint("mha"), enforce_eager=True) as engine:
        wanted = [tokens(engine.ask(ask))[0] for ask in (LONG, *BESIDE)]
        for plan in PLANS.values():
            with monkeypatch.context() as planned:
                slicer = slice_steps(engine, planned, 3.0, plan)
                assert run_beside(engine, slicer) == wanted
                assert len(slicer.paused) >= 4
            assert engine.is_idle()
        assert [tokens(engine.ask(ask))[0] for ask in (LONG, *BESIDE)] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("use_vmm", ["0", "1"])
def test_graphs_are_replayed_beside_a_paused_step(
    use_vmm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph writes in front of the buffers of a paused step, which have the same names."""
    monkeypatch.setenv("VLLM_USE_VMM", use_vmm)
    folder = make_checkpoint(tmp_path, seed=3, dtype=torch.bfloat16)
    long, short = Request(random_prompt(200, 1), SHORT), Request(random_prompt(20, 2), SHORT)
    with running(folder, dtype="bfloat16", max_model_len=256) as engine:
        plan, cut = engine.runner.planner.plan, replace(CUT, chunk_seconds=SECOND)

        def long_cut(step: StepShape, *arguments: Any) -> Plan:
            return cut if step.rows > 100 else plan(step, *arguments)

        def beside(body: Any, *_: Any) -> bool | None:
            return body is not None if engine.runner.pool.has_frame else None

        monkeypatch.setattr(engine.runner.planner, "plan", long_cut)
        wanted = [tokens(engine.ask(ask))[0] for ask in (long, short)]
        replays = record(monkeypatch, engine.runner.graphs, "run", beside)
        slicer = Slicer(engine, monkeypatch, seconds=2.0)
        slicer.long = {start(engine, "long", long)}
        for number in range(5):
            start(engine, f"short {number}", short)
            answers = finish_one(engine, f"short {number}")
            assert tokens([answers[f"short {number}"]]) == wanted[1:]
        assert tokens([finish(engine)["long"]]) == wanted[:1]
        assert replays.count(True) >= 10 and False not in replays


def finish_one(engine: Engine, name: str) -> dict[str, Response]:
    """Step until the request `name` has ended, and return all responses."""
    answers: dict[str, Response] = {}
    while name not in answers:
        answers |= step(engine)
    return answers

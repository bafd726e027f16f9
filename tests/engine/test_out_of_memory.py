# SPDX-License-Identifier: Apache-2.0
"""The memory of steps: reports, refused requests, and running out of memory."""

from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.models import LLaDAReference

from tests.checkpoints import random_prompt
from tests.engine.harness import (
    BLOCKS,
    Engine,
    Request,
    Response,
    as_request,
    assert_decoded,
    clear_case,
    finish,
    record_plans,
    record_steps,
    running,
    start,
    step,
    tokens,
)
from vllm.diffusion.api.validator import RequestRefused, validator_of
from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.engine.planning import model_shape
from vllm.diffusion.memory import (
    Admission,
    Demand,
    ModelShape,
    Planner,
    PoolExhaustedError,
    StepShape,
)
from vllm.diffusion.memory.cost import CPU


@pytest.mark.parametrize("error", ["pool", "torch"])
def test_running_out_of_memory_fails_the_largest_request_alone(
    error: str,
    engine: Engine,
    model: LLaDAReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other requests get the same tokens as alone, and get them in the same step."""
    lengths = (20, 90, 40)
    cases = [clear_case(model, length, **BLOCKS) for length in lengths]
    asks = [as_request(prompt, **BLOCKS) for prompt, _ in cases]
    launch, count = engine.runner.launch, 0

    def launch_until_full(req_ids: list[str]) -> Any:
        nonlocal count
        rows = sum(engine.runner.canvases[req_id].length for req_id in req_ids)
        count += 1
        step = launch(req_ids)
        if count >= 6 and rows > 130:
            if error == "pool":
                raise PoolExhaustedError("normed", 10, 5)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step

    with monkeypatch.context() as small:
        small.setattr(engine.runner, "launch", launch_until_full)
        first, largest, last = engine.ask(*asks)
    assert largest.finish_reason == "error"
    assert "memory" in largest.report["error"] or "wanted 10 bytes" in largest.report["error"]
    assert_decoded([first, last], [cases[0][1], cases[2][1]])
    assert engine.is_idle()
    assert engine.runner.pool.used_bytes == engine.runner.caches.reserved_bytes
    assert_decoded(engine.ask(*asks), [decoded for _, decoded in cases])


def test_every_stage_may_run_out_of_memory(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    """The largest request ends, whichever buffer does not fit, and its error names that buffer."""
    parameters = {"gen_length": 8, "block_length": 8, "steps": 4}
    cases = [clear_case(model, length, **parameters) for length in (20, 60)]
    asks = [as_request(prompt, **parameters) for prompt, _ in cases]
    launch, pool = engine.runner.launch, engine.runner.pool
    take, expect = pool.take, pool.expect
    failing, seen, is_large = "", dict[str, None](), False

    def noted_launch(req_ids: list[str]) -> Any:
        nonlocal is_large
        is_large = any(engine.runner.canvases[req_id].length > 60 for req_id in req_ids)
        return launch(req_ids)

    def noted(name: str, asks_pool: Any, *arguments: Any) -> Any:
        seen[name] = None
        if is_large and name == failing:
            raise PoolExhaustedError(name, 10, 5)
        return asks_pool(name, *arguments)

    monkeypatch.setattr(engine.runner, "launch", noted_launch)
    monkeypatch.setattr(pool, "take", lambda name, *a: noted(name, take, *a))
    monkeypatch.setattr(pool, "expect", lambda name, *a: noted(name, expect, *a))
    assert_decoded(engine.ask(*asks), [decoded for _, decoded in cases])
    assert len(seen) >= 8
    for failing in list(seen):
        small, large = engine.ask(*asks)
        assert_decoded([small], [cases[0][1]])
        assert large.finish_reason == "error"
        assert failing in large.report["error"]
        assert engine.is_idle()
        assert pool.used_bytes == engine.runner.caches.reserved_bytes


def test_a_step_that_never_fits_fails_all_its_requests_and_no_other(
    engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)

    def full(name: str, *_: Any) -> Any:
        raise PoolExhaustedError(name, 10, 5)

    with monkeypatch.context() as no_memory:
        no_memory.setattr(engine.runner.pool, "take", full)
        answers = engine.ask(*[as_request(prompt, **BLOCKS)] * 2)
    assert [answer.finish_reason for answer in answers] == ["error", "error"]
    assert engine.is_idle()
    (again,) = engine.ask(as_request(prompt, **BLOCKS))
    assert again.token_ids == wanted.ids


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_request_whose_cache_does_not_fit_ends_alone(
    num_failures: int, engine: Engine, model: LLaDAReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first failure frees the memory of earlier steps; the second one ends the request."""
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    allocate, failures = engine.runner.pages.allocate, 0

    def allocate_late(*arguments: Any) -> Any:
        nonlocal failures
        failures += 1
        if failures <= num_failures:
            raise PoolExhaustedError("caches", 10, 5)
        return allocate(*arguments)

    with monkeypatch.context() as full:
        full.setattr(engine.runner.pages, "allocate", allocate_late)
        cached, other = engine.ask(
            as_request(prompt, **BLOCKS, cache="dual"), as_request(prompt, **BLOCKS)
        )
    assert cached.finish_reason == ("length" if num_failures == 1 else "error")
    assert other.token_ids == wanted.ids
    assert engine.is_idle()


# ---- The activation pool in the engine: admitted, waiting and refused requests ----


GIB = 1 << 30
CACHED = {**BLOCKS, "cache": "dual"}


@pytest.fixture(scope="module")
def shape(engine: Engine) -> ModelShape:
    return model_shape(engine.llm.llm_engine.vllm_config)


def required_bytes(shape: ModelShape, *demands: Demand) -> int:
    """Return the smallest pool in which steps of all these requests fit."""

    def fits(num_bytes: int) -> bool:
        small = Admission(Planner(shape, num_bytes, row_budget=4096))
        return small.obstacle(demands[1:], demands[0]) is None

    return 1 + bisect_left(range(1, 1 << 22), True, key=fits)


@pytest.fixture
def set_pool(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_bytes(num_bytes: int) -> None:
        # The engine reserves a sixty-fourth of a pool for rounding.
        monkeypatch.setenv("VLLM_ACTIVATION_POOL_SIZE_BYTES", str(num_bytes * 64 // 63 + 64))

    return set_bytes


def test_usage_of_a_step_is_reported(engine: Engine) -> None:
    (answer,) = engine.ask(Request(random_prompt(20), BLOCKS))
    usage, planner = engine.scheduler.last_usage, engine.runner.planner
    assert usage.budget_bytes == planner.budget_bytes == answer.report["budget_bytes"]
    assert 0 < answer.report["average_bytes"] <= answer.report["peak_bytes"] < GIB
    assert usage.in_use_bytes == 0
    assert usage.planner_us > 0


def test_pages_that_nobody_uses_do_not_cut_a_step(
    shape: ModelShape,
    checkpoint: Callable[[str], Path],
    set_pool: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unused pages of requests with a cache are freed before a step is cut into chunks."""
    whole = Planner(shape, GIB, row_budget=4096).plan(StepShape(200, 32, 200))
    set_pool(whole.predicted_peak_bytes)
    with running(checkpoint("mha")) as engine:
        pages, actual = engine.runner.pages, record_plans(engine, monkeypatch)
        pages.allocate("gone", 3 * PAGE_SIZE)
        pages.release("gone")
        assert pages.unused_bytes > 0
        engine.ask(as_request(random_prompt(168), **BLOCKS))
        assert pages.unused_bytes == 0
    assert all(plan.is_whole(200) for plan, _ in actual)


def test_a_request_that_never_fits_is_refused_with_the_numbers(
    shape: ModelShape,
    checkpoint: Callable[[str], Path],
    model: LLaDAReference,
    set_pool: Callable[[int], None],
) -> None:
    prompt, wanted = clear_case(model, 20, **BLOCKS)
    set_pool(required_bytes(shape, Demand(100, 32)))
    with running(checkpoint("mha")) as small:
        asks = [as_request(random_prompt(length), **BLOCKS) for length in (150, 60)]
        refused, fits, good = small.ask(*asks, as_request(prompt, **BLOCKS))
        assert (refused.finish_reason, refused.token_ids) == ("error", [])
        budget = small.runner.budget_bytes
        assert refused.report["error"].startswith("prompt + gen_length: given 182; its steps need ")
        assert f"the pool has {budget}; wanted at most " in refused.report["error"]
        longest = int(refused.report["error"].split("wanted at most ")[1].split()[0])
        assert 100 <= longest < 182
        assert (fits.finish_reason, good.token_ids) == ("length", wanted.ids)
        assert small.is_idle()


def test_the_validator_refuses_what_never_fits_once_it_knows_the_budget(
    shape: ModelShape, checkpoint: Callable[[str], Path]
) -> None:
    with running(checkpoint("mha")) as engine:
        validator = validator_of(engine.llm.llm_engine.input_processor)
        assert validator is not None
        assert validator.decide_sampling(*request_of(100)).gen_length == 32
        worker = engine.core.model_executor.driver_worker.worker
        validator.learn_capacity(*worker.capacity())
        assert validator.decide_sampling(*request_of(100)).gen_length == 32
        validator.learn_capacity(required_bytes(shape, Demand(100, 32)), CPU)
        assert validator.decide_sampling(*request_of(60)).gen_length == 32
        with pytest.raises(RequestRefused, match=r"prompt \+ gen_length: given 182; its steps"):
            validator.decide_sampling(*request_of(150))


def request_of(prompt_length: int) -> tuple[Any, list[int]]:
    from tests.engine.harness import sampling_params

    prompt = random_prompt(prompt_length)
    return sampling_params(as_request(prompt, **BLOCKS)), prompt


def test_requests_that_do_not_fit_together_wait(
    shape: ModelShape,
    checkpoint: Callable[[str], Path],
    model: LLaDAReference,
    monkeypatch: pytest.MonkeyPatch,
    set_pool: Callable[[int], None],
) -> None:
    lengths = (50, 40, 20, 60)
    cases = [clear_case(model, length, **BLOCKS) for length in lengths]
    asks = [as_request(prompt, **BLOCKS) for prompt, _ in cases]
    set_pool(required_bytes(shape, Demand(82, 32), Demand(52, 32)))
    with running(checkpoint("mha")) as small:
        steps = record_steps(small, monkeypatch)
        assert_decoded(small.ask(*asks), [decoded for _, decoded in cases])
    assert {len(step) for step in steps} == {1, 2}


@pytest.mark.parametrize(("count", "share"), [(2, 0.55), (3, 0.62)])
@pytest.mark.parametrize("ahead", [False, True])
def test_together_requests_keep_more_than_half_of_the_pool(
    ahead: bool,
    count: int,
    share: float,
    engine: Engine,
    shape: ModelShape,
    checkpoint: Callable[[str], Path],
    model: LLaDAReference,
    set_pool: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests with large caches run at once and give the same answers as alone.

    With three of them, the pool could not hold the caches of two requests twice.
    """
    asks = [as_request(clear_case(model, 224, **BLOCKS)[0], **CACHED) for _ in range(count)]
    alone = [engine.ask(ask)[0] for ask in asks]
    kept_bytes = count * 256 * shape.cache_bytes
    set_pool(int(kept_bytes / share))
    with running(checkpoint("mha"), max_num_batched_tokens=256) as small:
        monkeypatch.setattr(small.loop, "runs_ahead", ahead)
        steps, answers = record_steps(small, monkeypatch), dict[str, Response]()
        for name, one in zip("abc", asks, strict=False):
            start(small, name, one)
            for _ in range(5):
                answers |= step(small)
        assert not answers
        assert small.runner.caches.num_bytes == kept_bytes > small.runner.pool.budget_bytes / 2
        answers = finish(small)
    assert tokens([answers[name] for name in "abc"[:count]]) == tokens(alone)
    assert max(map(len, steps)) == count


def test_kept_keys_and_values_are_counted_and_given_back(
    shape: ModelShape,
    checkpoint: Callable[[str], Path],
    set_pool: Callable[[int], None],
) -> None:
    """Two cached requests do not fit together. Afterwards a long step may use the whole pool."""
    row = shape.cache_bytes
    set_pool(2 * 200 * row)  # six pages of 64 positions, and steps need more than two of them
    with running(checkpoint("mha")) as small:
        ask = Request(random_prompt(100), {**CACHED, "ignore_eos": True})
        first, second = small.ask(ask, ask)  # 132 positions each, so that they run in turn
        assert first.token_ids == second.token_ids and len(first.token_ids) == 32
        assert small.is_idle()
        runner = small.runner
        assert runner.caches.num_bytes == 0 < runner.caches.reserved_bytes
        full = Admission(Planner(runner.planner.shape, runner.planner.budget_bytes, 4096))
        with pytest.raises(ActivationBudgetError) as refused:
            full.check(Demand(4096, 32))
        assert runner.caches.reserved_bytes > row  # the longest step must free these bytes
        length = min(refused.value.longest_tokens, 250)
        (long,) = small.ask(Request(random_prompt(length - 32), {**BLOCKS, "ignore_eos": True}))
        assert len(long.token_ids) == 32

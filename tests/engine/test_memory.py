# SPDX-License-Identifier: Apache-2.0
"""The activation pool in the engine: who is admitted, who waits, and who is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.checkpoints import random_prompt
from tests.engine.harness import (
    BLOCKS,
    Ask,
    as_request,
    assert_decoded,
    clear_case,
    record_plans,
    record_steps,
    running,
)
from vllm.diffusion.api.validator import RequestRefused, validator_of
from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.engine.planning import model_shape
from vllm.diffusion.memory import Admission, Demand, ModelShape, Planner, StepShape
from vllm.diffusion.memory.cost import CPU

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.harness import Engine
    from tests.reference.models import LLaDAReference

GIB = 1 << 30
CACHED = {**BLOCKS, "cache": "dual"}


@pytest.fixture(scope="module")
def shape(engine: Engine) -> ModelShape:
    return model_shape(engine.llm.llm_engine.vllm_config)


def required_bytes(shape: ModelShape, *demands: Demand) -> int:
    """The smallest pool in which steps of all these requests fit, but for a few bytes."""
    low, high = 1, 1 << 22
    while high - low > 256:
        middle = (low + high) // 2
        small = Admission(Planner(shape, middle, row_budget=4096))
        if small.obstacle(demands[1:], demands[0]) is None:
            high = middle
        else:
            low = middle + 1
    return low


@pytest.fixture
def set_pool(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_bytes(num_bytes: int) -> None:
        # a sixty-fourth of a pool is left to rounding
        monkeypatch.setenv("VLLM_ACTIVATION_POOL_SIZE_BYTES", str(num_bytes * 64 // 63 + 64))

    return set_bytes


def test_usage_of_a_step_is_reported(engine: Engine) -> None:
    (answer,) = engine.ask(Ask(random_prompt(20), BLOCKS))
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
    """Requests that kept keys and values leave pages behind, as the warm-up of a server does."""
    whole = Planner(shape, GIB, row_budget=4096).plan(StepShape(200, 32, 200))
    set_pool(whole.predicted_peak_bytes)
    with running(checkpoint("mha")) as engine:
        pages, found = engine.runner.pages, record_plans(engine, monkeypatch)
        pages.allocate("gone", 3 * PAGE_SIZE)
        pages.release("gone")
        assert pages.unused_bytes > 0
        engine.ask(as_request(random_prompt(168), **BLOCKS))
        assert pages.unused_bytes == 0
    assert all(plan.is_whole(200) for plan, _ in found)


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
        assert validator.decide_sampling(*asked(100)).gen_length == 32
        worker = engine.core.model_executor.driver_worker.worker
        validator.learn_capacity(*worker.capacity())
        assert validator.decide_sampling(*asked(100)).gen_length == 32
        validator.learn_capacity(required_bytes(shape, Demand(100, 32)), CPU)
        assert validator.decide_sampling(*asked(60)).gen_length == 32
        with pytest.raises(RequestRefused, match=r"prompt \+ gen_length: given 182; its steps"):
            validator.decide_sampling(*asked(150))


def asked(prompt_length: int) -> tuple[Any, list[int]]:
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


def test_kept_keys_and_values_are_counted_and_given_back(
    shape: ModelShape,
    checkpoint: Callable[[str], Path],
    set_pool: Callable[[int], None],
) -> None:
    """Caches have half of the pool; afterwards a long step may have all of it."""
    row = shape.cache_bytes
    set_pool(2 * 200 * row)  # three pages of 64
    with running(checkpoint("mha")) as small:
        ask = Ask(random_prompt(100), {**CACHED, "ignore_eos": True})
        first, second = small.ask(ask, ask)  # 132 positions each: one after the other
        assert first.token_ids == second.token_ids and len(first.token_ids) == 32
        assert small.is_idle()
        runner = small.runner
        assert runner.caches.num_bytes == 0 < runner.caches.reserved_bytes
        full = Admission(Planner(runner.planner.shape, runner.planner.budget_bytes, 4096))
        with pytest.raises(ActivationBudgetError) as refused:
            full.check(Demand(4096, 32))
        assert runner.caches.reserved_bytes > row  # so that the longest step must take it back
        length = min(refused.value.longest_tokens, 250)
        (long,) = small.ask(Ask(random_prompt(length - 32), {**BLOCKS, "ignore_eos": True}))
        assert len(long.token_ids) == 32

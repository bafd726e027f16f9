# SPDX-License-Identifier: Apache-2.0
"""Tokens of cached requests do not depend on where their pages are or when the pages move."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from reference.models import LLaDAReference

from tests.checkpoints import random_prompt
from tests.engine.cases import PLANS
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    as_request,
    clear_case,
    record_plans,
    start,
    step,
    tokens,
)
from vllm.diffusion.core.errors import ActivationBudgetError
from vllm.diffusion.core.pages import PAGE_SIZE, num_pages

BLOCKS: dict[str, Any] = {"gen_length": 16, "block_length": 8, "steps": 8}
MULTI: dict[str, Any] = {
    "algorithm": "multi_block",
    "gen_length": 16,
    "block_length": 8,
    "threshold": 1.0,
    "cache_delay_iter": 1,
    "refresh_interval": 3,
}
CACHED: dict[str, dict[str, Any]] = {
    "prefix": {**BLOCKS, "cache": "prefix"},
    "dual": {**BLOCKS, "cache": "dual"},
    "delayed": {**MULTI, "cache": "delayed"},
    "none": BLOCKS,
}
LENGTHS = (20, 150, 31, 33, 97, 70, 5, 180)  # less than one page to four pages


def requests() -> list[Request]:
    """Return cached requests of every kind whose last pages are partly filled."""
    kinds = list(CACHED.values())
    return [
        as_request(random_prompt(length, seed), **kinds[seed % len(kinds)])
        for seed, length in enumerate((*LENGTHS, *LENGTHS[::-2]))
    ]


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[tuple[list[int], int | None]]:
    """Return the tokens of every request when it runs alone."""
    return tokens([engine.ask(ask)[0] for ask in requests()])


def come_and_go(engine: Engine, seed: int, after_step: Callable[[], None]) -> list[Response]:
    """Start the requests a few steps apart, so that pages are taken and released at any time."""
    upstream, rng = engine.llm.llm_engine, random.Random(seed)
    waiting = list(enumerate(requests()))
    answers: dict[str, Response] = {}
    rng.shuffle(waiting)
    while waiting or upstream.has_unfinished_requests():
        for number, ask in [waiting.pop() for _ in waiting[: rng.randint(0, 2)]]:
            start(engine, str(number), ask)
        answers |= step(engine)
        after_step()
    assert engine.is_idle()
    return [answers[str(number)] for number in range(len(answers))]


ALL_AT_ONCE = "2 head groups, rows in host memory"


@pytest.mark.parametrize(
    ("name", "runs_ahead"),
    [
        *(("whole", False), ("chunks", True), ("2 head groups", False), (ALL_AT_ONCE, True)),
    ],
)
def test_requests_that_come_and_go_find_what_they_kept(
    engine: Engine,
    alone: list[tuple[list[int], int | None]],
    runs_ahead: bool,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests keep their tokens under every plan of chunks, head groups and host memory."""
    monkeypatch.setattr(engine.loop, "runs_ahead", runs_ahead)
    if (plan := PLANS.get(name)) is not None:
        monkeypatch.setattr(engine.runner.planner, "plan", lambda *_: plan)
    pages, rng = engine.runner.pages, random.Random(7)
    orders = set()

    def after_step() -> None:
        kept = [c.window.cache for c in engine.runner.canvases.values() if c.window.cache]
        orders.update(tuple(cache.pages.tolist()) for cache in kept)
        used = pages.store.num_pages - len(pages.store.free)
        assert used == sum(num_pages(cache.length) for cache in kept)
        if rng.random() < 0.2:
            pages.trim()
        spare = [f"spare {number}" for number in range(len(pages.store.free))]
        for name in spare:
            pages.allocate(name, PAGE_SIZE)
        rng.shuffle(spare)
        for name in spare:  # the next request gets these pages in another order
            pages.release(name)

    assert tokens(come_and_go(engine, 1, after_step)) == alone
    assert pages.store.num_bytes == 0
    is_consecutive = [list(order) == [*range(order[0], order[0] + len(order))] for order in orders]
    assert not all(is_consecutive)


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_pages_that_move_for_a_plan_are_found_by_its_step(
    engine: Engine, model: LLaDAReference, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is trimmed between the packing of a step and its launch."""
    parameters = {**BLOCKS, "cache": cache}
    prompt, wanted = clear_case(model, 90, **parameters)
    pages, plan, attempts = engine.runner.pages, engine.runner.planner.plan_alike, 0
    pages.allocate("another", 3 * PAGE_SIZE)

    def refuse_once(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 4:
            pages.release("another")
            pages.allocate("shorter", 1)
            raise ActivationBudgetError(1, 1, 1, 1)
        return plan(*arguments)

    monkeypatch.setattr(engine.runner.planner, "plan_alike", refuse_once)
    (answer,) = engine.ask(as_request(prompt, **parameters))
    pages.release("shorter")
    assert attempts > 4
    assert tokens([answer]) == [(wanted.ids, wanted.num_forwards)]


def test_pages_move_once_for_all_that_start_together(engine: Engine) -> None:
    pages, store = engine.runner.pages, engine.runner.caches

    def moves(*lengths: int) -> int:
        assert engine.is_idle()
        pages.trim()
        version = store.layout_version
        engine.ask(*(as_request(random_prompt(n), **BLOCKS, cache="dual") for n in lengths))
        return int(store.layout_version - version)

    assert moves(150, 70, 90, 180) == moves(20) > 0


@pytest.mark.parametrize("cache", ["prefix", "dual"])
def test_steps_take_no_more_than_planned(
    engine: Engine, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached keys are copied out of their pages here; the copies are most of a window's memory."""
    actual = record_plans(engine, monkeypatch)
    engine.ask(as_request(random_prompt(190), **BLOCKS, cache=cache))
    assert len(actual) >= 8
    for plan, usage in actual:
        assert 0.5 * plan.predicted_peak_bytes < usage.peak_bytes <= plan.predicted_peak_bytes


def test_parity_with_ragged_pages(engine: Engine, model: LLaDAReference) -> None:
    """Sequences a little longer than a page, in one batch, give the tokens of published loops."""
    asks, canvases = [], []
    for number, parameters in enumerate(CACHED.values()):
        prompt, wanted = clear_case(model, 31 + 33 * number, **parameters)
        asks.append(as_request(prompt, **parameters))
        canvases.append((wanted.ids, wanted.num_forwards))
    assert tokens(engine.ask(*asks)) == canvases

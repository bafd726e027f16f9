# SPDX-License-Identifier: Apache-2.0
"""Running out of memory in the middle of a step ends one request, never the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.engine.harness import BLOCKS, as_request, assert_decoded, clear_case
from vllm.diffusion.memory import PoolExhaustedError

if TYPE_CHECKING:
    from tests.engine.harness import Engine
    from tests.reference.models import LLaDAReference


@pytest.mark.parametrize("error", ["pool", "torch"])
def test_running_out_of_memory_fails_the_largest_request_alone(
    error: str,
    engine: Engine,
    model: LLaDAReference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others get their tokens in the same step, and the same tokens."""
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
    """Whatever it is that does not fit, the largest request ends, and says what it was."""
    asked = {"gen_length": 8, "block_length": 8, "steps": 4}
    cases = [clear_case(model, length, **asked) for length in (20, 60)]
    asks = [as_request(prompt, **asked) for prompt, _ in cases]
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
    """The first failure gives back what steps left behind; the second one counts."""
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

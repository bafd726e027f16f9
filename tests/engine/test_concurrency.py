# SPDX-License-Identifier: Apache-2.0
"""Cached requests have few rows in most steps, so that many of them run at once."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_prompt
from tests.engine.harness import Engine, Request, running

CANVAS: dict[str, Any] = {"gen_length": 16, "ignore_eos": True}
BLOCKS = {**CANVAS, "block_length": 8, "steps": 8}
DUAL = {**BLOCKS, "cache": "dual"}
DEFAULT = None  # upstream's row budget
# All windows of the 64 requests fit, but at most 12 first forward passes.
NARROW = 64 * 8


class Watched:
    """Records for every step of an engine the scheduled rows by request."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.steps: list[dict[str, int]] = []
        self.most_running = 0
        update = engine.scheduler.update_from_output

        def noted(step: Any, done: Any) -> Any:
            self.most_running = max(self.most_running, engine.scheduler.get_request_counts()[0])
            if done.results:
                self.steps.append(step.num_scheduled_tokens)
                # The message names every request of the step and its number of rows.
                assert set(step.num_scheduled_tokens) == set(done.results)
                assert step.total_num_scheduled_tokens == done.num_rows
            return update(step, done)

        monkeypatch.setattr(engine.scheduler, "update_from_output", noted)

    def assert_as_alone(self, asks: list[Request]) -> None:
        """Check that the requests give the same answers together and alone; equal ones run once."""
        together = self.engine.ask(*asks)
        self.steps, steps = [], self.steps
        alone = {str(ask): self.engine.ask(ask)[0] for ask in {str(a): a for a in asks}.values()}
        self.steps = steps
        for ask, answer in zip(asks, together, strict=True):
            assert answer.token_ids == alone[str(ask)].token_ids, ask
            assert answer.num_forwards == alone[str(ask)].num_forwards
        assert self.engine.is_idle()


@pytest.fixture(scope="module", params=[DEFAULT, NARROW], ids=["default budget", "narrow"])
def wide(
    checkpoint: Callable[[str], Path], request: pytest.FixtureRequest
) -> Iterator[tuple[Engine, int]]:
    settings = {} if request.param is None else {"max_num_batched_tokens": request.param}
    with running(checkpoint("mha"), **settings) as engine:
        config = engine.llm.llm_engine.vllm_config.scheduler_config
        yield engine, config.max_num_batched_tokens


@pytest.fixture(params=[False, True], ids=["step by step", "ahead"])
def watched(
    wide: tuple[Engine, int], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Watched:
    engine, _ = wide
    monkeypatch.setattr(engine.loop, "runs_ahead", request.param)
    return Watched(engine, monkeypatch)


def dual_requests(budget: int) -> list[Request]:
    """Return 64 requests whose first forward passes do not fit into a step of `budget` rows."""
    length = 150 if budget > NARROW else 25
    return [Request(random_prompt(length, seed=i % 4), DUAL) for i in range(64)]


def test_all_windows_run_at_once_and_first_forwards_are_spread(
    wide: tuple[Engine, int], watched: Watched
) -> None:
    _, budget = wide
    asks = dual_requests(budget)
    length = len(asks[0].prompt) + 16
    assert 64 * 8 <= budget < 64 * length
    watched.assert_as_alone(asks)
    assert watched.most_running == 64
    rows = [sum(step.values()) for step in watched.steps]
    assert max(rows) <= budget
    firsts = [list(step.values()).count(length) for step in watched.steps]
    assert sum(firsts) >= 2 * 64  # one per block of each request
    assert firsts[0] == budget // length  # the first step uses the whole budget
    assert max(map(len, watched.steps)) > budget // length
    # All requests advance at the same pace: none waits until the others end.
    ends = {req_id: i for i, step in enumerate(watched.steps) for req_id in step}
    assert max(ends.values()) - min(ends.values()) <= 2 * (64 // firsts[0] + 1)


@pytest.mark.parametrize("wide", [NARROW], ids=["narrow"], indirect=True)
@pytest.mark.parametrize(
    ("parameters", "watched"),
    [
        (BLOCKS, True),
        ({**BLOCKS, "cfg_scale": 1.0}, False),
        ({**BLOCKS, "cache": "prefix"}, True),
        ({**CANVAS, "block_length": 8, "algorithm": "multi_block", "cache": "delayed"}, False),
        ({**CANVAS, "algorithm": "dream", "steps": 4}, True),
    ],
    ids=["whole", "guided", "prefix", "delayed", "dream"],
    indirect=["watched"],
)
def test_windows_beside_forwards_of_other_kinds(
    wide: tuple[Engine, int], watched: Watched, parameters: dict[str, Any]
) -> None:
    _, budget = wide
    others = [Request(random_prompt(60, seed=i % 3), parameters) for i in range(6)]
    asks = [ask for pair in zip(dual_requests(budget), others, strict=False) for ask in pair]
    watched.assert_as_alone(asks + dual_requests(budget)[:6])
    assert max(sum(step.values()) for step in watched.steps) <= budget


def test_a_first_forward_beyond_the_budget_goes_alone(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first forward pass over the budget runs alone, and its windows share steps with others."""
    with running(checkpoint("mha"), max_num_batched_tokens=128) as engine:
        watched = Watched(engine, monkeypatch)
        giant = Request(random_prompt(200), DUAL)
        watched.assert_as_alone(
            [*(Request(random_prompt(9, seed=i), DUAL) for i in range(5)), giant]
        )
    assert watched.most_running == 6
    assert {len(step) for step in watched.steps if sum(step.values()) > 128} == {1}
    assert any(216 in step.values() for step in watched.steps)
    assert any(len(step) == 6 for step in watched.steps)

# SPDX-License-Identifier: Apache-2.0
"""The order in which requests start: by arrival, with a bounded right to overtake."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_prompt
from tests.engine.harness import (
    Engine,
    Request,
    Response,
    record_steps,
    running,
    sampling_params,
    to_answer,
)
from vllm.diffusion.engine.scheduler import waiting as admission

BUDGET = 128  # rows
SMALL = Request(random_prompt(8), {"gen_length": 8, "steps": 2, "ignore_eos": True})
LARGE = Request(random_prompt(96), {"gen_length": 16, "steps": 4, "ignore_eos": True})
# This request only runs alone.
GIANT = Request(random_prompt(200), {"gen_length": 16, "steps": 4, "ignore_eos": True})


@pytest.fixture(scope="module")
def narrow(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with running(checkpoint("mha"), max_num_batched_tokens=BUDGET, max_num_seqs=64) as engine:
        yield engine


class Traffic:
    """Requests that are sent by name, and the order in which they start."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._engine = engine.llm.llm_engine
        self._steps = record_steps(engine, monkeypatch)
        self.answers: dict[str, Response] = {}

    def send(self, name: str, ask: Request, priority: int = 0) -> None:
        prompt: Any = {"prompt_token_ids": ask.prompt}
        self._engine.add_request(name, prompt, sampling_params(ask), priority=priority)

    def step(self) -> None:
        outputs = self._engine.step()
        self.answers |= {o.request_id: to_answer(o) for o in outputs if o.finished}

    def is_finished(self, name: str) -> bool:
        return name in self.answers

    def finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self.step()

    @property
    def started(self) -> list[str]:
        """Return the names in the order of their first step, without the engine's suffix."""
        internal = dict.fromkeys(req_id for step in self._steps for req_id in step)
        return [req_id.rsplit("-", 1)[0] for req_id in internal]


@pytest.fixture
def traffic(narrow: Engine, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    return Traffic(narrow, monkeypatch)


def test_small_requests_do_not_wait_for_room_that_only_a_large_one_needs(traffic: Traffic) -> None:
    for name, ask in (("first", LARGE), ("second", LARGE), ("small", SMALL)):
        traffic.send(name, ask)
    traffic.finish()
    assert traffic.started == ["first", "small", "second"]


@pytest.mark.parametrize("kept_out", [LARGE, GIANT], ids=["large", "giant"])
def test_a_stream_of_small_requests_cannot_keep_a_large_one_out(
    traffic: Traffic, kept_out: Request
) -> None:
    """A large request starts although two small ones arrive with every step."""
    for i in range(4):
        traffic.send(f"before {i}", SMALL)
    traffic.step()
    traffic.send("large", kept_out)
    for i in range(100):
        traffic.send(f"even {i}", SMALL)
        traffic.send(f"odd {i}", SMALL)
        traffic.step()
        if traffic.is_finished("large"):
            break
    assert traffic.is_finished("large")
    traffic.finish()
    overtook = traffic.started.index("large") - 4
    assert 0 < overtook <= admission.MAX_OVERTAKEN


def test_large_requests_cannot_keep_a_small_one_out(traffic: Traffic) -> None:
    """Each request of a stream of giants runs alone. A small one starts after at most one giant."""
    traffic.send("giant 0", GIANT)
    traffic.step()
    traffic.send("giant 1", GIANT)
    traffic.send("small", SMALL)
    for i in range(2, 100):
        traffic.send(f"giant {i}", GIANT)
        traffic.step()
        if traffic.is_finished("small"):
            break
    assert traffic.started.index("small") <= 2
    traffic.finish()


def test_those_of_a_lower_number_start_first(traffic: Traffic) -> None:
    """The parameter `priority` takes precedence over the priority of upstream's request."""
    traffic.send("giant", GIANT)
    traffic.step()
    for name, priority, upstreams in (("c", None, 2), ("b", 1, 0), ("a", -5, 9), ("d", None, 2)):
        parameters = {} if priority is None else {"priority": priority}
        traffic.send(name, Request(LARGE.prompt, {**LARGE.extra, **parameters}), upstreams)
    traffic.finish()
    assert traffic.started == ["giant", "a", "b", "c", "d"]


@pytest.mark.parametrize("ahead", [False, True])
def test_those_of_a_lower_number_step_first(
    ahead: bool, narrow: Engine, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The priority also decides which rows fit into a step; first forward passes are whole here."""
    monkeypatch.setattr(narrow.loop, "runs_ahead", ahead)
    parameters = {**LARGE.extra, "cache": "dual", "block_length": 8}
    for name, priority in (("first", 1), ("second", 1), ("urgent", 0)):
        traffic.send(name, Request(LARGE.prompt, {**parameters, "priority": priority}))
    traffic.finish()
    assert traffic.started == ["urgent", "first", "second"]


def test_a_request_ends_when_its_time_is_over(
    narrow: Engine, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued or running request ends after `timeout_s`, others go on, and no state is left."""
    slow = Request(GIANT.prompt, {**GIANT.extra, "gen_length": 48, "steps": 48})
    late = {"timeout_s": 100}
    traffic.send("running", Request(slow.prompt, {**slow.extra, **late}))
    traffic.send("queued", Request(slow.prompt, {**slow.extra, **late}))
    traffic.send("stays", SMALL)
    for _ in range(3):
        traffic.step()
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 100)
    traffic.step()
    for name, state in (("running", "running"), ("queued", "queued")):
        answer = traffic.answers[name]
        assert answer.finish_reason == "abort"
        assert answer.report["error"] == f"timeout: not complete 100 s after arrival ({state})"
    assert traffic.answers["running"].report["num_forwards"] > 0
    traffic.finish()
    assert traffic.answers["stays"].finish_reason == "length"
    assert narrow.is_idle()


def test_equals_start_in_order_of_arrival(traffic: Traffic) -> None:
    names = [str(i) for i in range(40)]
    for name in names:
        traffic.send(name, SMALL)
    traffic.finish()
    assert traffic.started == names


def test_a_lone_request_by_its_own_wish_is_not_kept_out_either(traffic: Traffic) -> None:
    alone = Request(SMALL.prompt, {**SMALL.extra, "force_single_batch": True})
    traffic.send("before", SMALL)
    traffic.step()
    traffic.send("alone", alone)
    for i in range(60):
        traffic.send(str(i), SMALL)
        traffic.step()
    assert traffic.is_finished("alone")
    traffic.finish()

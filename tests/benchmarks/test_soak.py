# SPDX-License-Identifier: Apache-2.0
"""The soak test: failures that its clients detect, and a few seconds with a tiny model."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import soak
from benchmarks.soak import Clients, Outcome, settle, summary
from tests.stub_server import Stub

LEFT = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'


class Stand(Stub):
    """Answers with the seed of the body, but 13 gets a wrong token and 14 an error."""

    def reply(self, _: str, body: Any) -> tuple[int, Any]:
        if body is None:
            return 200, LEFT
        if body["seed"] == 14:
            return 500, {"error": {"message": "broken"}}
        return 200, {"token_ids": [[99 if body["seed"] == 13 else body["seed"]]]}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Stand().serving() as server:
        yield server.url


def run(url: str, seeds: list[int], monkeypatch: pytest.MonkeyPatch, leaving: float) -> Outcome:
    monkeypatch.setattr(soak, "SHARE_LEAVING", leaving)
    monkeypatch.setattr(soak, "leave", lambda url, body, after_s: None)
    bodies = [{"seed": seed} for seed in seeds]
    return Clients(url, bodies, [[seed] for seed in seeds]).run(3, seconds=0.3, seed=1)


def test_equal_answers_are_good(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(url, [1, 2, 3], monkeypatch, leaving=0.0)
    assert outcome.is_good
    assert outcome.num_answers > 3
    assert outcome.num_left == 0
    assert outcome.rss_early >= 0


def test_another_answer_is_noticed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(url, [1, 13], monkeypatch, leaving=0.0)
    assert set(outcome.different) == {1}
    assert not outcome.is_good


def test_a_failure_is_noticed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(url, [14], monkeypatch, leaving=0.0)
    assert outcome.num_answers == 0
    assert "broken" in outcome.failures[0]
    assert not outcome.is_good
    assert "broken" in summary(outcome)


def test_those_who_leave_are_counted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = run(url, [1], monkeypatch, leaving=1.0)
    assert outcome.num_left > 0
    assert outcome.num_answers == 0


def test_what_is_left_in_the_engine_is_noticed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "SETTLE_S", 0.0)
    assert settle(url) == 3
    assert not Outcome(num_unfinished=3).is_good

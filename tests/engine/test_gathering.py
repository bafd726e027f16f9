# SPDX-License-Identifier: Apache-2.0
"""Readings of one call start together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.diffusion.engine.gathering import LONGEST_WAIT_S, Gathering
from vllm.diffusion.scoring import ScoreRequest


def reading(group: str = "", size: int = 1) -> Any:
    score = ScoreRequest((0,), ((1,),), group=group, group_size=size)
    return SimpleNamespace(params=SimpleNamespace(score=score))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nobody_starts_before_all_are_there() -> None:
    gathering, items = Gathering(Clock()), [reading("a", 3) for _ in range(3)]
    for number, item in enumerate(items):
        gathering.arrived(item)
        assert gathering.waits(items[0]) is (number < 2)


def test_others_do_not_wait() -> None:
    gathering, other = Gathering(Clock()), SimpleNamespace(params=SimpleNamespace(score=None))
    gathering.arrived(reading("a", 2))
    for item in (reading("b", 1), reading(), other):
        gathering.arrived(item)
        assert not gathering.waits(item)


def test_those_that_never_come_are_not_waited_for() -> None:
    clock = Clock()
    gathering, item = Gathering(clock), reading("a", 2)
    gathering.arrived(item)
    assert gathering.waits(item)
    clock.now = LONGEST_WAIT_S
    assert not gathering.waits(item)
    assert not gathering.waits(reading("a", 2)), "late ones wait for nobody"

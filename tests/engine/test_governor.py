# SPDX-License-Identifier: Apache-2.0
"""How many states are guessed: no more than save time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_prompt
from tests.engine.harness import UNCUT, Ask, Engine, running, speculating
from vllm.diffusion.decoding.drafting import Drafter
from vllm.diffusion.engine.worker.governor import HoldingRates, Offer, worthwhile

# Milliseconds of a step of an 8B model by rows, as an H200 takes them.
TIMES = {32: 4.3, 64: 4.7, 128: 5.0, 256: 7.0, 512: 12.0}
ONE_BY_ONE: dict[str, Any] = {"gen_length": 64, "block_length": 32, "steps": 64}


def seconds(rows: int) -> float:
    return next((ms / 1e3 for bucket, ms in TIMES.items() if rows <= bucket), float("inf"))


def chain(chance: float, count: int = 15) -> Offer:
    return Offer([chance**depth for depth in range(1, count + 1)], 32)


def test_guesses_stand_where_rows_cost_less_than_they_save() -> None:
    assert worthwhile([chain(0.7)], 1, 32, seconds) == [3]
    assert worthwhile([chain(0.95)], 1, 32, seconds) == [7]
    assert worthwhile([chain(0.05)], 1, 32, seconds) == [0]
    assert worthwhile([chain(0.7, 2)], 1, 32, seconds) == [2]
    assert worthwhile([chain(0.7), chain(0.2)], 2, 64, seconds) == [2, 0]
    assert worthwhile([chain(0.7)] * 8, 8, 256, seconds) == [0] * 8
    assert worthwhile([], 3, 96, seconds) == []


def test_rates_are_learned_by_kind_count_and_depth() -> None:
    rates = HoldingRates()
    assert rates.chance("a", None, 1) == rates.chance("a", None, 9) == 0.5
    assert [rates.chance("a", count, 1) for count in (1, 2, 3)] == [0.5, 0.25, 0.125]
    for _ in range(32):
        rates.learn("a", None, 1, holds=False)
    assert rates.chance("a", None, 1) < 0.04
    assert rates.chance("a", None, 4) == rates.chance("a", None, 1)  # never tried
    assert rates.chance("b", None, 1) == 0.5
    for _ in range(500):
        rates.learn("a", None, 1, holds=True)
    assert rates.chance("a", None, 1) > 0.9


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    settings = {"dllm": {**UNCUT["dllm"], "weighs_guesses": True}}
    with running(checkpoint("mha"), additional_config=settings) as engine:
        yield engine


def test_wrong_guesses_end_soon(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then whether they would hold is learned without a forward."""
    monkeypatch.setattr(engine.runner, "_seconds_of", lambda rows, _: seconds(rows // 3))
    draft = Drafter.draft

    def wrong(*given: Any) -> list[Any]:
        return [s._replace(tokens=(s.tokens + 1) % 200) for s in draft(*given)]

    ask = Ask(random_prompt(20, 1), {**ONE_BY_ONE, "ignore_eos": True, "seed": 1})
    (plain,) = engine.ask(ask)
    with monkeypatch.context() as broken:
        broken.setattr(Drafter, "draft", wrong)
        first, second = (engine.ask(*speculating([ask], 7))[0] for _ in range(2))
    assert first.token_ids == second.token_ids == plain.token_ids
    assert first.report["states_accepted"] == 0 < first.report["states_drafted"] < 7 * 32
    assert second.report["states_drafted"] == 0

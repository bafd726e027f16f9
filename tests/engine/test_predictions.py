# SPDX-License-Identifier: Apache-2.0
"""A predicted text changes the number of forward passes, and no token of the answer."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import random_prompt
from tests.engine.harness import Engine, Request, Response, running

CASES = {"nemotron": ("self_speculation", "block_length"), "idlm": ("introspective", "stride")}
LENGTH = 40


@pytest.fixture(scope="module", params=CASES)
def served(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Iterator[tuple[Engine, str, str]]:
    """Start an engine; return it, an algorithm that verifies drafts, and the field of its size."""
    with running(checkpoint(request.param)) as engine:
        yield engine, *CASES[request.param]


def ask(algorithm: str, prompt: list[int], **more: Any) -> Request:
    extra = {"algorithm": algorithm, "gen_length": LENGTH, "ignore_eos": True, **more}
    return Request(prompt, extra)


def plain(engine: Engine, prompt: list[int], **more: Any) -> list[int]:
    (answer,) = engine.ask(ask("autoregressive", prompt, **more))
    return answer.token_ids


@pytest.mark.parametrize("size", [2, 8, 16])
@pytest.mark.parametrize("cache", ["exact", "none"])
def test_a_right_prediction_takes_the_fewest_forwards(
    served: tuple[Engine, str, str], size: int, cache: str
) -> None:
    engine, algorithm, field = served
    prompt = random_prompt(11)
    answer = plain(engine, prompt)
    one = ask(algorithm, prompt, predicted_token_ids=answer, cache=cache, **{field: size})
    (predicted,) = engine.ask(one)
    assert predicted.token_ids == answer
    assert predicted.num_forwards == 1 + -(-(LENGTH - 1) // size)
    report = predicted.report
    assert report["prediction_tried"] == report["prediction_held"] > 0


def changed(answer: list[int], rng: random.Random) -> list[int]:
    """Return an answer with some tokens replaced, inserted and deleted."""
    text = list(answer)
    for _ in range(rng.randrange(8)):
        at, kind = rng.randrange(len(text)), rng.randrange(3)
        text[at : at + (kind < 2)] = [rng.randrange(5, 200)] if kind else []
    return text


def test_wrong_predictions_change_no_token(served: tuple[Engine, str, str]) -> None:
    engine, algorithm, field = served
    rng = random.Random(2)
    asks, wanted = list[Request](), list[list[int]]()
    for number in range(24):
        prompt = random_prompt(rng.randint(1, 40), seed=number)
        drawn = {"temperature": rng.choice([0, 0, 0.8]), "seed": number}
        answer = plain(engine, prompt, **drawn)
        text = changed(answer, rng) or [5]
        more = {**drawn, "predicted_token_ids": text, field: rng.choice([2, 4, 8])}
        asks.append(ask(algorithm, prompt, **more))
        wanted.append(answer)
    answers = engine.ask(*asks)
    assert [answer.token_ids for answer in answers] == wanted
    held = sum(answer.report["prediction_held"] for answer in answers)
    tried = sum(answer.report["prediction_tried"] for answer in answers)
    assert 0.3 * tried < held < tried
    alone: list[Response] = [engine.ask(one)[0] for one in asks[::5]]
    assert [answer.token_ids for answer in alone] == wanted[::5]
    assert engine.is_idle()


def test_an_end_in_the_prediction(served: tuple[Engine, str, str]) -> None:
    """A prediction that is longer than the answer, and one that is shorter."""
    engine, algorithm, _ = served
    prompt = random_prompt(7)
    answer = plain(engine, prompt)
    for text in (answer[:9], [*answer, *answer]):
        (predicted,) = engine.ask(ask(algorithm, prompt, predicted_token_ids=text))
        assert predicted.token_ids == answer


def test_other_algorithms_ignore_a_prediction(served: tuple[Engine, str, str]) -> None:
    engine, *_ = served
    (answer,) = engine.ask(ask("autoregressive", [5], predicted_token_ids=[1, 2]))
    assert answer.report["ignored"] == ["predicted_token_ids"]


def test_trajectories_are_refused(served: tuple[Engine, str, str]) -> None:
    engine, algorithm, _ = served
    one = ask(algorithm, [5], predicted_token_ids=[1], return_trajectory=True)
    with pytest.raises(ValueError, match="wanted none with return_trajectory"):
        engine.ask(one)

# SPDX-License-Identifier: Apache-2.0
"""Bodies of /v1/decisions are read or refused, whatever they hold."""

import random
from typing import Any

import pytest

from tests.decision_bodies import BODIES, broken
from vllm.diffusion.api.decisions.calls import MAX_QUESTIONS, DecisionCall, read_body
from vllm.diffusion.core.errors import InvalidParameterError

NUM_BODIES = 2000


@pytest.mark.parametrize("body", BODIES)
def test_valid_bodies_are_read(body: dict[str, Any]) -> None:
    call = read_body(body)
    assert len(call.questions) == len(body["questions"])
    assert all(question.question.options for question in call.questions)


def test_random_bodies_are_read_or_refused_by_name() -> None:
    draw, num_refused = random.Random(5), 0
    for _ in range(NUM_BODIES):
        body = broken(draw)
        try:
            assert isinstance(read_body(body), DecisionCall)
        except InvalidParameterError as error:
            num_refused += 1
            assert error.field
            assert str(error).startswith(f"{error.field}: ")
            assert str(error).isprintable()
            assert len(str(error)) < 600
    assert NUM_BODIES // 2 < num_refused < NUM_BODIES


def test_a_value_and_its_text_are_two_choices() -> None:
    choices = [{"value": value} for value in ("true", True, "false", False, "True", "1")]
    question = {"type": "choice", "instructions": "x", "choices": choices}
    (read,) = read_body({"input": "a", "questions": [question]}).questions
    assert [(type(v), v) for v in read.values] == [(type(c["value"]), c["value"]) for c in choices]
    shown = [option.name for option in read.question.options]
    assert shown == ['"true"', "true", '"false"', "false", '"True"', '"1"']


def test_the_largest_call() -> None:
    choices = [{"value": str(number)} for number in range(255)]
    question = {"type": "choice", "instructions": "x", "choices": choices}
    call = read_body({"input": "a", "questions": [question] * MAX_QUESTIONS})
    assert len(call.questions) == MAX_QUESTIONS
    assert call.questions[0].question.labels == ()

# SPDX-License-Identifier: Apache-2.0
"""Bodies of /v1/decisions are read or refused, whatever they hold."""

import copy
import random
from typing import Any

import pytest

from vllm.diffusion.api.decisions.calls import MAX_QUESTIONS, DecisionCall, read_body
from vllm.diffusion.core.errors import InvalidParameterError

NUM_BODIES = 2000
MESSAGES = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}], "type": "message"},
    {"role": "assistant", "content": "b", "phase": "final_answer"},
    {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "x", "id": None},
    {"type": "custom_tool_call_output", "call_id": "1", "output": [], "status": "completed"},
    {"role": "user", "content": [{"type": "input_json", "data": [{"k": None}]}]},
]
QUESTIONS = [
    {"type": "predicate", "instructions": "x", "name": "n"},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "a"}],
        "choices": [{"value": "a", "description": "d"}, {"value": True}, {"value": "true"}],
    },
    {"type": "score", "instructions": "", "levels": [{"label": "a"}, {"label": "b"}]},
]
BY_ID = {
    "a": {"type": "noul", "instructions": "x", "criteria": {"true": "t"}},
    "b": {"type": "choice", "criteria": {"x": None, "y": "z"}},
    "c": {"type": "score", "criteria": ["low", "high"]},
}
BODIES: tuple[dict[str, Any], ...] = (
    {"input": MESSAGES, "questions": QUESTIONS, "model": "m", "orders": 2, "cache_salt": "s"},
    {"input": "text", "questions": QUESTIONS * 100, "joint": True, "timeout_s": 1.5},
    {"state": {"k": [1, 2]}, "questions": BY_ID, "instructions": "i", "priority": 3},
)
BROKEN = (
    *(None, True, False, 0, 1, -1, 2**70, 1.5, float("nan"), "", "x", "\u0000", "x" * 3000),
    *([], [[]], [None], {}, {"": 1}, {"type": "choice"}, ["a", "a"], {"value": 1}, ["input_image"]),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values below a value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value[:4])
    below = [(*path, key) for key, _ in items]
    return [*below, *(place for key, item in items for place in places(item, (*path, key)))]


def broken(draw: random.Random) -> dict[str, Any]:
    """Return a valid body with one to three values that are replaced, removed or added."""
    body = copy.deepcopy(draw.choice(BODIES))
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice(places(body))
        container: Any = body
        for key in path:
            container = container[key]
        change = draw.random()
        if change < 0.6:
            container[last] = copy.deepcopy(draw.choice(BROKEN))
        elif change < 0.8 and isinstance(container, dict):
            del container[last]
        elif isinstance(container, dict):
            container[draw.choice(["type", "stream", "name", "x\ny", "value"])] = last
        else:
            container.insert(0, copy.deepcopy(draw.choice(BROKEN)))
    return body


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

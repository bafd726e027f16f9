# SPDX-License-Identifier: Apache-2.0
"""Valid bodies of /v1/decisions, and random changes that mostly make them invalid."""

import copy
import random
from typing import Any

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
    {"input": "text", "questions": QUESTIONS * 20, "joint": True, "timeout_s": 1.5},
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


def broken(draw: random.Random, **fields: Any) -> dict[str, Any]:
    """Return a valid body with one to three values that are replaced, removed or added.

    Args:
        draw: random numbers.
        fields: values that replace fields of the valid body.
    """
    body = {**copy.deepcopy(draw.choice(BODIES)), **fields}
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

# SPDX-License-Identifier: Apache-2.0
"""Checks of the raw bytes of a body."""

import json
from typing import Any

import pytest

from tests.engine.harness import record
from vllm.diffusion.api.server import body_reading
from vllm.diffusion.core.errors import InvalidParameterError

MAX_LENGTH = 1000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": list(range(2000))},
        {"prompt": ["x" * MAX_LENGTH] * 5},
        {"prompt": '"\\' * (MAX_LENGTH // 2), "suffix": "x" * 600},
    ],
    ids=["token ids", "several texts", "escapes"],
)
def test_a_large_body_without_a_long_text_is_not_parsed(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = json.dumps(body).encode()
    assert len(sent) > MAX_LENGTH
    parsed = record(monkeypatch, json, "loads", lambda content, *_: content)
    body_reading.check(sent, MAX_LENGTH)
    assert parsed == []


@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ({"prompt": "x" * 1001}, True),
        ({"prompt": '"\\' * 500 + "x"}, True),
        ({"prompt": ["x" * 1001, "y"]}, True),
        ({"prompt": "é" * 1001}, True),
        ({"prompt": "é" * 1000}, False),
        ({"messages": [{"content": "x" * 600}] * 2}, True),
        ({"messages": [{"content": "x" * 200}] * 3, "tools": ["x" * 900]}, False),
        ({"input": ["x" * 600] * 2}, True),
    ],
)
@pytest.mark.parametrize("escapes", [True, False])
def test_long_texts_are_refused(body: dict[str, Any], refused: bool, escapes: bool) -> None:
    sent = json.dumps(body, ensure_ascii=escapes).encode()
    if refused:
        with pytest.raises(
            InvalidParameterError, match=f"{next(iter(body))}: given '1... characters"
        ):
            body_reading.check(sent, MAX_LENGTH)
    else:
        body_reading.check(sent, MAX_LENGTH)


def test_the_name_of_a_field_may_be_escaped() -> None:
    sent = rb'{"mess\u0061ges": ["%s", "%s"]}' % (b"x" * 600, b"x" * 600)
    with pytest.raises(InvalidParameterError, match="messages: given"):
        body_reading.check(sent, MAX_LENGTH)

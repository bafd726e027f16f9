# SPDX-License-Identifier: Apache-2.0
"""Edit and apply requests in the form of Inception's API, as editors send them."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.editing_bodies import (
    CURSOR,
    END_LINE,
    FIRST_LINE,
    REGION,
    applying,
    continue_dev,
    continues_region,
    zed,
    zeds_region,
)
from tests.server.client import Client, refusal, text_of
from tests.server.process import MODEL_NAME

EDIT, APPLY = "/v1/edit/completions", "/v1/apply/completions"
NOTHING = {"max_edits": 0, "slack": 0}  # changes no token
LINES = REGION.split("\n")
CODE = "def add(a, b):\n    result = a + b\n    return result\n\n\nprint(add(1, 2))"


def edited(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to an edit request in the form of an answer that is not streamed."""
    if not body.get("stream"):
        return client.answer(EDIT, body)
    events = client.events(EDIT, body)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    content = "".join(map(text_of, events))
    choices = [{"index": 0, "message": {"role": "assistant", "content": content}}]
    return {"choices": choices, "diffusion": events[-1]["diffusion"]}


@pytest.mark.parametrize(("make", "read"), [(zed, zeds_region), (continue_dev, continues_region)])
def test_a_region_without_a_change_is_returned_as_it_is(
    client: Client, make: Callable[..., dict[str, Any]], read: Callable[[str], str]
) -> None:
    for region in (REGION, "a = 1", "\tx  \r\n  y\u0301 = '\U0001f600'\r\n\nz", "\n\n", " "):
        answer = edited(client, {**make(region, min(CURSOR, len(region))), **NOTHING})
        assert read(text_of(answer)) == region
        assert answer["diffusion"]["num_forwards"] == 1


@pytest.mark.parametrize(("make", "read"), [(zed, zeds_region), (continue_dev, continues_region)])
def test_only_lines_around_the_cursor_change(
    client: Client, make: Callable[..., dict[str, Any]], read: Callable[[str], str]
) -> None:
    answer = edited(client, {**make(), "noise": 1, "algorithm": "threshold", "threshold": 0.3})
    region = read(text_of(answer))
    assert region != REGION
    before, after = LINES[:FIRST_LINE], LINES[END_LINE:]
    assert region.startswith("\n".join([*before, ""]))
    assert region.endswith("\n".join(["", *after]))
    assert answer["diffusion"]["num_edited"] > 0


def test_the_answer_of_an_edit(client: Client) -> None:
    answer = client.answer(EDIT, {"model": MODEL_NAME, **zed(), **NOTHING})
    assert answer["object"] == "edit.completion"
    assert answer["model"] == MODEL_NAME
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": f"```\n{REGION}\n```"}
    assert answer["usage"]["prompt_tokens"] > 0


def test_masks_at_the_cursor_may_become_text(client: Client) -> None:
    plain = zeds_region(text_of(client.answer(EDIT, {**zed(), **NOTHING, "slack": 8})))
    assert plain.startswith(REGION[:CURSOR])
    assert plain.endswith(REGION[CURSOR:])


def test_usage_of_a_stream(client: Client) -> None:
    body = {**continue_dev(), **NOTHING, "stream_options": {"include_usage": True}}
    *_, last = client.events(EDIT, body)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "messages: given '0 user messages'; wanted one"),
        ({"messages": "x"}, "messages", "wanted a list with one user message"),
        (
            {"messages": [{"role": "user", "content": "a"}] * 2},
            "messages",
            "messages: given '2 user messages'; wanted one",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "messages[0].content",
            "<|code_to_edit|> is missing",
        ),
        (
            {"messages": [{"role": "user", "content": "<|code_to_edit|>\n<|/code_to_edit|>"}]},
            "messages[0].content",
            "wanted code between the tags",
        ),
        ({"max_tokens": 5}, "messages[0].content", "wanted at most max_tokens, 5"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: given 0; wanted 1 to 8192"),
        ({"slack": 257}, "slack", "slack: given 257; wanted 0 to 256"),
        ({"n": 2}, "n", "n: given 2; wanted 1"),
        ({"pinned": [[0, 1]]}, "pinned", "wanted none: the route sets it"),
        ({"noise": 2}, "noise", "noise: given 2; wanted at most 1"),
    ],
)
def test_wrong_edits_are_refused(
    client: Client, fields: dict[str, Any], param: str, message: str
) -> None:
    error = refusal(client.http.post(EDIT, json={**zed(), **fields}))
    assert message in error["message"]
    assert error["param"] == param
    missing = client.http.post(EDIT, json={**zed(), "model": "nobody"})
    assert refusal(missing, 404)["code"] == 404


@pytest.mark.parametrize("stream", [False, True])
def test_certain_merges_need_no_forward_pass(client: Client, stream: bool) -> None:
    snippet = "# ... existing code ...\ndef add(a, b):\n    return a + b\n\n\nprint(add(1, 2))"
    body = applying(CODE, snippet, stream=stream)
    wanted = "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))"
    if stream:
        events = client.events(APPLY, body)
        assert "".join(map(text_of, events)) == wanted
        assert events[-1]["diffusion"] == {"num_forwards": 0}
        return
    answer = client.answer(APPLY, body)
    assert (answer["object"], text_of(answer)) == ("apply.completion", wanted)
    assert answer["diffusion"] == {"num_forwards": 0}
    assert answer["model"] == MODEL_NAME


def test_the_model_merges_where_context_is_missing(client: Client) -> None:
    body = applying(CODE, "add a docstring", max_tokens=32, model=MODEL_NAME)
    answer = client.answer(APPLY, body)
    assert answer["diffusion"]["num_forwards"] > 0
    assert answer["usage"]["completion_tokens"] <= 32
    assert isinstance(text_of(answer), str)


def test_wrong_apply_requests_are_refused(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "<|original_code|>\na\n<|/original_code|>"}]}
    error = refusal(client.http.post(APPLY, json=body))
    assert error["param"] == "messages[0].content"
    assert error["message"].endswith("<|update_snippet|> is missing")

# SPDX-License-Identifier: Apache-2.0
"""Conversations in the forms of several APIs: texts in parts, tool calls, results, prefills."""

import json
from typing import Any

import pytest

from tests.server.client import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    QUESTION,
    RESPONSES,
    Client,
    body_for,
    refusal,
    text_of,
)
from tests.server.process import MODEL_NAME

BATCH = "/v1/chat/completions/batch"
COUNT = "/v1/messages/count_tokens"
ASKED = {"role": "user", "content": QUESTION}
PARTS: list[Any] = [
    QUESTION,
    {"type": "text", "text": QUESTION},
    {"type": "input_text", "text": QUESTION},
    {"type": "output_text", "text": QUESTION, "annotations": []},
    {"type": "refusal", "refusal": QUESTION},
]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"}


def with_content(route: str, content: Any) -> dict[str, Any]:
    """Return a body of `route` whose only message has this content."""
    message = {"role": "user", "content": content}
    if route == RESPONSES:
        return {"model": MODEL_NAME, "input": [message]}
    if route == BATCH:
        return {"model": MODEL_NAME, "messages": [[message]]}
    return {"model": MODEL_NAME, "messages": [message], "max_tokens": 32}


def prompt_of(client: Client, messages: list[Any], **fields: Any) -> str:
    """Return the text of the prompt that the chat route renders from a conversation."""
    body = {"messages": messages, "max_tokens": 64, "return_token_ids": True, **fields}
    tokens = client.answer(CHAT, body)["prompt_token_ids"]
    return str(client.answer("/detokenize", {"tokens": tokens})["prompt"])


@pytest.mark.parametrize("route", [GENERATE, CHAT, BATCH, MESSAGES, RESPONSES])
def test_texts_of_every_dialect_are_taken(client: Client, route: str) -> None:
    for part in PARTS:
        body = with_content(route, [part])
        if route == BATCH:
            body["max_tokens"] = 32
        if route == RESPONSES:
            body["max_output_tokens"] = 32
        assert text_of(client.answer(route, body)) == ANSWER


@pytest.mark.parametrize("route", [GENERATE, CHAT, BATCH, MESSAGES, COUNT, RESPONSES])
def test_parts_that_are_no_text_are_refused_by_their_path(client: Client, route: str) -> None:
    place = {BATCH: "messages[0][0]", RESPONSES: "input[0]"}.get(route, "messages[0]")
    good = {"type": "text", "text": "a"}
    for part, step, given in (
        ({"type": "image_url", "image_url": {"url": "x"}}, ".type", "'image_url'"),
        ({"type": "input_audio"}, ".type", "'input_audio'"),
        ({"type": "document", "source": {}}, ".type", "'document'"),
        ({"type": "text", "text": 5}, ".text", "5"),
        ({"type": "input_text"}, ".text", "nothing"),
        ({"type": "refusal", "text": "a"}, ".refusal", "nothing"),
        (5, "", "5"),
        ({"text": "a"}, "", "{'text': 'a'}"),
    ):
        error = refusal(client.http.post(route, json=with_content(route, [good, part])))
        assert error["param"] == f"{place}.content[1]{step}"
        assert error["message"].startswith(f"{error['param']}: given {given}; wanted ")
        assert "\n" not in error["message"]


def test_results_and_calls_are_written_whether_tools_are_given_or_not(client: Client) -> None:
    """The parts of a text are joined, with and without tools in the request."""
    beside = [{"type": "text", "text": "Let me"}, {"type": "text", "text": "look."}]
    for content, result in (
        ("Let me\nlook.", "Sunny"),
        (beside, [{"type": "text", "text": "Sunny"}]),
    ):
        called = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        history = [ASKED, called, {**RESULT, "content": result}, ASKED]
        for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
            prompt = prompt_of(client, history, **fields)
            written = (
                'Let me\nlook.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}'
            )
            assert written in prompt
            assert "<tool_response>\nSunny\n</tool_response>" in prompt
            assert "{'" not in prompt and '"type": "text"' not in prompt
            assert ("You may call" in prompt) == (fields == {"tools": TOOLS})


def test_the_older_form_of_calls_is_written_as_tools_are(client: Client) -> None:
    older: list[dict[str, Any]] = [
        ASKED,
        {"role": "assistant", "content": None, "function_call": CALL["function"]},
        {"role": "function", "name": "weather", "content": "Sunny"},
    ]
    newer = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    assert prompt_of(client, older) == prompt_of(client, newer)
    for wrong, step in (({"name": "f"}, ".arguments"), (5, "")):
        body = {"messages": [ASKED, {**older[1], "function_call": wrong}]}
        error = refusal(client.http.post(CHAT, json=body))
        assert error["param"] == f"messages[1].function_call{step}"


CALL_FAULTS: list[tuple[Any, str, str]] = [
    (5, "", "5"),
    ([5], "[0]", "5"),
    ([{**CALL, "id": 5}], "[0].id", "5"),
    ([{**CALL, "type": "custom"}], "[0].type", "'custom'"),
    ([{"id": "a", "type": "function"}], "[0].function", "nothing"),
    ([CALL, {**CALL, "function": {"name": "f"}}], "[1].function.arguments", "nothing"),
    ([{**CALL, "function": {"name": "f", "arguments": {}}}], "[0].function.arguments", "{}"),
    ([{**CALL, "function": {"arguments": "{}"}}], "[0].function.name", "nothing"),
    (
        [{**CALL, "function": {"name": "f", "arguments": "[" * 5000 + "]" * 5000}}],
        "[0].function.arguments",
        "'[[[",
    ),
    (
        [{**CALL, "function": {"name": "f", "arguments": "9" * 5000}}],
        "[0].function.arguments",
        "'999",
    ),
    (
        [{**CALL, "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}],
        "[0].function.arguments.a",
        "'\\ud800'",
    ),
]


@pytest.mark.parametrize(("calls", "step", "given"), CALL_FAULTS)
def test_calls_of_the_history_are_refused_by_their_path(
    client: Client, calls: Any, step: str, given: str
) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    for route, messages, place in (
        (CHAT, [ASKED, message], "messages[1]"),
        (GENERATE, [ASKED, message], "messages[1]"),
        (BATCH, [[ASKED], [ASKED, message]], "messages[1][1]"),
    ):
        error = refusal(client.http.post(route, json={"messages": messages}))
        assert error["param"] == f"{place}.tool_calls{step}"
        assert error["message"].startswith(f"{error['param']}: given {given}")


def test_items_of_a_response_are_refused_by_their_path(client: Client) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "Sunny"}
    for item, step in (
        ({**call, "arguments": {}}, ".arguments"),
        ({**call, "name": None}, ".name"),
        ({**call, "call_id": 5}, ".call_id"),
        ({**call, "arguments": '["\\ud800"]'}, ".arguments[0]"),
        ({**output, "output": 5}, ".output"),
        ({**output, "output": [{"type": "input_image"}]}, ".output[0].type"),
        ({"role": "usr", "content": "a"}, ".role"),
    ):
        error = refusal(client.http.post(RESPONSES, json={"input": [ASKED, item]}))
        assert error["param"] == f"input[1]{step}"


def test_histories_of_responses(client: Client) -> None:
    """Items that OpenAI's API allows are accepted: empty and split texts, calls, and results."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    texts = [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    parts = [{"type": "input_text", "text": "Sunny"}]
    for items in (
        [{"type": "message", "role": "assistant", "content": []}],
        [{"role": "assistant", "content": texts}],
        [
            {
                "type": "message",
                "role": "assistant",
                "content": texts,
                "id": "m",
                "status": "completed",
            }
        ],
        [call, {"type": "function_call_output", "call_id": "c", "output": parts}],
    ):
        body = {"input": [ASKED, *items, ASKED], "max_output_tokens": 32}
        client.answer(RESPONSES, body)
    several = client.answer(
        RESPONSES, {"input": [ASKED, {"role": "assistant", "content": texts}, ASKED]}
    )
    one = client.answer(
        RESPONSES, {"input": [ASKED, {"role": "assistant", "content": "a\nb"}, ASKED]}
    )
    assert several["usage"]["input_tokens"] == one["usage"]["input_tokens"]


def test_a_prefill_is_continued(client: Client) -> None:
    begun = {"role": "assistant", "content": "The capital of"}
    body = body_for(MESSAGES, messages=[ASKED, begun])
    answer = client.answer(MESSAGES, body)
    assert f"The capital of{text_of(answer)}" == ANSWER
    body["messages"][1]["content"] = [{"type": "text", "text": "The capital of"}]
    assert client.answer(MESSAGES, body)["content"] == answer["content"]
    body["messages"][1]["content"] = " "
    error = refusal(client.http.post(MESSAGES, json=body))
    assert error["param"] == "messages[1].content"


def test_tokens_are_counted_as_the_request_has_them(client: Client) -> None:
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    called = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "a"}]}
    history = [
        ASKED,
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
    ]
    fields: dict[str, Any]
    for fields in (
        {},
        {"tools": tools},
        {"tools": tools, "tool_choice": {"type": "none"}},
        {"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}},
        {"messages": history},
        {"messages": history, "tools": tools, "system": [{"type": "text", "text": "Be kind."}]},
        {"messages": [ASKED, {"role": "assistant", "content": "The"}]},
    ):
        body = body_for(MESSAGES, **{"messages": [ASKED], "max_tokens": 64, **fields})
        counted = client.answer(COUNT, body)["input_tokens"]
        assert counted == client.answer(MESSAGES, body)["usage"]["input_tokens"]
    unknown = {"tools": tools, "tool_choice": {"type": "tool", "name": "nope"}}
    for route in (MESSAGES, COUNT):
        error = refusal(client.http.post(route, json=body_for(MESSAGES, **unknown)))
        assert error["message"] == "tool_choice.name: given 'nope'; wanted one of: weather"


def test_a_batch_refuses_what_it_has_not(client: Client) -> None:
    body = {"messages": [[ASKED]], "max_tokens": 32}
    assert refusal(client.http.post(BATCH, json={**body, "tools": TOOLS}))["param"] == "tools"
    assert refusal(client.http.post(BATCH, json={**body, "algoritm": "x"}))["param"] == "algoritm"
    for name, value in (("seed", "x"), ("top_p", []), ("bad_words", [[]]), ("ignore_eos", "maybe")):
        error = refusal(client.http.post(BATCH, json={**body, name: value}))
        assert (error["param"] or "").startswith(name)
        assert error["message"].startswith(name) and "\n" not in error["message"]


def test_a_prompt_is_rendered_as_the_request_has_it(client: Client) -> None:
    """The render route gives the prompt of the real route, with tools and parts, or its refusal."""
    body = {"messages": [{"role": "user", "content": PARTS[:2]}], "max_tokens": 64}
    for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        rendered = client.answer(f"{CHAT}/render", {**body, **fields})
        answer = client.answer(CHAT, {**body, **fields, "return_token_ids": True})
        assert rendered["token_ids"] == answer["prompt_token_ids"]
        tokenised = client.answer("/tokenize", {"messages": body["messages"], "tools": TOOLS})
    assert (
        tokenised["tokens"]
        == client.answer(f"{CHAT}/render", {**body, "tools": TOOLS})["token_ids"]
    )
    for name, value in (("algoritm", "x"), ("gen_length", 0)):
        error = refusal(client.http.post(f"{CHAT}/render", json={**body, name: value}))
        assert error["param"] == name


def test_ten_stop_strings(client: Client) -> None:
    """Editors that complete code send ten; the first one that appears in the answer ends it."""
    stops = [f"never {i}" for i in range(9)] + ["France"]
    for route, name in ((CHAT, "stop"), (MESSAGES, "stop_sequences"), (BATCH, "stop")):
        body = with_content(route, QUESTION) | {"max_tokens": 32}
        assert text_of(client.answer(route, {**body, name: stops})) == "The capital of "
        error = refusal(client.http.post(route, json={**body, name: ["a"] * 2000}))
        assert error["message"].startswith(f"{name}: given ['a', 'a', ")
        assert "at most 1024" in error["message"]


TYPES = {400: "invalid_request_error", 404: "not_found_error"}


def test_errors_of_messages_have_anthropics_types(client: Client) -> None:
    for status, response in (
        (400, client.http.post(MESSAGES, json={})),
        (
            400,
            client.http.post(MESSAGES, content=b"{", headers={"Content-Type": "application/json"}),
        ),
        (404, client.http.post(MESSAGES, json=body_for(MESSAGES, model="other"))),
        (404, client.http.post(f"{MESSAGES}/nope", json={})),
    ):
        error = refusal(response, status)
        assert error["type"] == TYPES[status]


def test_answers_of_messages_have_anthropics_ids(client: Client) -> None:
    body = body_for(MESSAGES)
    assert client.answer(MESSAGES, body)["id"].startswith("msg_")
    with client.http.stream("POST", MESSAGES, json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    start = json.loads(lines[0].removeprefix("data: "))
    assert start["type"] == "message_start" and start["message"]["id"].startswith("msg_")


@pytest.mark.parametrize("route", [GENERATE, CHAT, BATCH, COMPLETIONS, MESSAGES, COUNT, RESPONSES])
def test_null_is_not_given(client: Client, route: str) -> None:
    """Null is accepted in all documented fields at once, and never reaches the engine."""
    document = client.http.get("/openapi.json").json()
    operation = document["paths"][route]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties = document["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    assert len(properties) >= 8
    request_body = body_for(route) if route == COMPLETIONS else with_content(route, QUESTION)
    client.answer(route, {**dict.fromkeys(properties), **request_body})
    for name in sorted(properties.keys() & {"priority", "ignore_eos", "stream", "n", "seed"}):
        client.answer(route, {**request_body, name: None})
    assert client.ask()["finish_reason"] == ["stop"]

# SPDX-License-Identifier: Apache-2.0
"""Texts and bodies that no tokenizer or parser can read, in every field of every route."""

import gzip
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
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
    refusal,
)
from tests.server.process import MODEL_NAME

JSON = {"Content-Type": "application/json"}
LONE = "\ud800"
HANG_S = 60  # seconds; a refusal takes far less on a busy machine
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
    {
        "role": "assistant",
        "content": "Wait.",
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "Sunny"},
    {"role": "user", "content": QUESTION},
]
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
SHARED: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 8}
BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"prompt": QUESTION, "stop": ["a"], "bad_words": ["b"], "algorithm": "semi_ar"},
    CHAT: {
        "messages": CONVERSATION,
        "tools": [{"type": "function", "function": FUNCTION}],
        "stop": ["a"],
        "user": "u",
        "request_id": "r",
        "chat_template_kwargs": {"style": "s"},
        "cache_prompt": "c",
    },
    "/v1/chat/completions/batch": {"messages": [CONVERSATION], "stop": "a"},
    COMPLETIONS: {"prompt": [QUESTION, "b"], "suffix": "c", "stop": ["a"], "bad_words": ["b"]},
    MESSAGES: {
        "system": "Be kind.",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "Sunny"}],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "stop_sequences": ["a"],
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": QUESTION}]},
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "b"}'},
            {"type": "function_call_output", "call_id": "c", "output": "Sunny"},
        ],
        "instructions": "Be kind.",
    },
    "/v1/loglikelihood": {"context": QUESTION, "continuation": "Paris"},
    "/tokenize": {"messages": CONVERSATION},
}


def places(value: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yield every text in a body: its path as refusals name it, and the keys that lead to it."""
    if isinstance(value, str):
        yield path, []
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in items:
        step = f"[{key}]" if isinstance(key, int) else f".{key}"
        if isinstance(child, str | dict | list):
            for actual, keys in places(child, f"{path}{step}".removeprefix(".")):
                yield actual, [key, *keys]


def changed(body: dict[str, Any], keys: list[Any], value: Any) -> dict[str, Any]:
    """Return a copy of a body with another value in one place."""
    copied = deepcopy(body)
    owner: Any = copied
    for key in keys[:-1]:
        owner = owner[key]
    owner[keys[-1]] = value
    return copied


CASES = [
    (route, path, keys, {**SHARED, **body})
    for route, body in BODIES.items()
    for path, keys in places({**SHARED, **body})
]


def post(client: Client, route: str, content: bytes) -> Any:
    return client.http.post(route, content=content, headers=JSON, timeout=HANG_S)


@pytest.mark.parametrize("route", BODIES)
def test_half_a_character_is_refused_by_its_path(client: Client, route: str) -> None:
    """Every text and key of the body is checked before any work, escaped or as bytes."""
    own = [case for case in CASES if case[0] == route]
    assert len(own) > 2
    for _, path, keys, body in own:
        for text in (LONE, "Paris \udc00", "a" * 5000 + LONE):
            error = refusal(post(client, route, json.dumps(changed(body, keys, text)).encode()))
            assert error["param"] == path
            assert error["message"].startswith(f"{path}: given '")
            assert "half a character" in error["message"] and len(error["message"]) < 300
    raw = json.dumps({**SHARED, **BODIES[route]})[:-1] + ', "x": "'
    assert refusal(post(client, route, raw.encode() + b'\xed\xa0\x80"}'))["param"] == "x"
    in_a_key = {**SHARED, **BODIES[route], LONE: 1}
    assert refusal(post(client, route, json.dumps(in_a_key).encode()))["param"] == "body"
    assert client.num_requests() == 0


def test_whole_characters_pass_however_they_are_written(client: Client) -> None:
    for prompt in ("🐈 \\ud800", "é🐈", "\u0000"):
        for ascii_only in (True, False):
            body = {**SHARED, "prompt": prompt}
            content = json.dumps(body, ensure_ascii=ascii_only).encode()
            assert post(client, GENERATE, content).status_code == 200


def test_half_a_character_within_json_within_a_text(client: Client) -> None:
    """The arguments of a call are a text whose JSON is parsed later."""
    calls = deepcopy(CONVERSATION)
    calls[2]["tool_calls"][0]["function"]["arguments"] = json.dumps({"a": LONE})
    response = client.http.post(CHAT, json={**SHARED, "messages": calls})
    assert response.status_code in (200, 400), response.text
    parameters = {**SHARED, "messages": CONVERSATION}
    deep, long = "[" * 5000 + "]" * 5000, "9" * 5000
    for schema in (json.dumps({"enum": [LONE]}), f'{{"enum": {deep}}}', f'{{"minimum": {long}}}'):
        nested = {"structured_outputs": {"json": schema}}
        error = refusal(client.http.post(CHAT, json={**parameters, **nested}))
        assert error["param"] == "structured_outputs.json"


def test_a_packed_format_is_checked_like_any_value(client: Client) -> None:
    """The route is upstream's for tokens, on which any client can set `extra_args`."""
    for kind, value in (("json", "[" * 5000), ("json", "{"), ("tools", "5"), ("tools", "[{}, 1]")):
        extra = {"dllm_spec": [kind, value, "dllm_spec"]}
        sampling = {"max_tokens": 8, "extra_args": extra}
        body = {"token_ids": [5], "sampling_params": sampling}
        error = refusal(client.http.post("/inference/v1/generate", json=body))
        assert error["message"].startswith("dllm_spec: given ")


UNREADABLE: list[tuple[bytes, str]] = [
    (gzip.compress(b'{"prompt": "hi"}'), "gzip"),
    ('{"prompt": "hi"}'.encode("utf-16"), "UTF-16"),
    ('{"prompt": "hi"}'.encode("utf-16-le"), "UTF-16"),
    ('{"prompt": "hi"}'.encode("utf-32-be"), "UTF-16 or UTF-32"),
    ('{"prompt": "hé"}'.encode("latin-1"), "byte 0xe9"),
    (b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", "nested"),
    (b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", "digits"),
]


@pytest.mark.parametrize("route", BODIES)
def test_an_unreadable_body_is_told_why(client: Client, route: str) -> None:
    for content, cause in UNREADABLE:
        error = refusal(post(client, route, content))
        assert error["message"].startswith("body: given '")
        assert cause in error["message"] and "\n" not in error["message"]


TEMPLATED = [CHAT, "/v1/chat/completions/batch", MESSAGES, "/v1/messages/count_tokens"]


@pytest.mark.parametrize("route", [*TEMPLATED, RESPONSES, "/tokenize"])
def test_a_template_gets_only_its_variables(client: Client, route: str) -> None:
    """Upstream passes them to the tokenizer as well, which could pad a prompt to any length."""
    for name, value in (
        *(("tokenize", True), ("padding", "max_length"), ("max_length", 10**9)),
        *(("truncation", True), ("return_tensors", "pt"), ("tokenizer_kwargs", {})),
        *(("add_generation_prompt", False), ("tools", [5]), ("messages", [])),
    ):
        body = {**SHARED, **BODIES[route], "chat_template_kwargs": {"padding": True, name: value}}
        if name != "padding":
            del body["chat_template_kwargs"]["padding"]
        error = refusal(client.http.post(route, json=body))
        assert error["param"] == f"chat_template_kwargs.{name}"


def test_variables_that_the_template_does_not_read_are_named(client: Client) -> None:
    body = {**SHARED, "messages": CONVERSATION[-1:], "chat_template_kwargs": {"style": "kind"}}
    ignored = client.answer(CHAT, body)["diffusion"]["ignored"]
    assert ignored == ["chat_template_kwargs.style"]
    error = refusal(client.http.post(CHAT, json={**body, "chat_template": "{{ messages }}"}))
    assert error["param"] == "chat_template"


@pytest.mark.parametrize("route", BODIES)
def test_odd_texts_harm_no_other_request(client: Client, route: str) -> None:
    """Long, repeated, nested and cut texts are sent in turn while a fixed question is answered."""
    nested: Any = "a"
    for _ in range(200):
        nested = [nested]
    odd = ["é" * 20_000, "<tool_call>" * 2000, LONE, ["a"] * 500, nested]

    def ask() -> str:
        answer = client.ask(gen_length=32)
        return str(answer["text"][0])

    with ThreadPoolExecutor(1) as others:
        for number, case in enumerate(case for case in CASES if case[0] == route):
            _, path, keys, body = case
            if number % 3 == 0:
                fixed = others.submit(ask)
            for value in (odd[number % len(odd)], odd[(number + 2) % len(odd)]):
                start = time.monotonic()
                content = json.dumps(changed(body, keys, value)).encode()
                response = post(client, route, content)
                assert response.status_code < 500, (path, response.text[:200])
                assert time.monotonic() - start < HANG_S, path
            assert fixed.result(timeout=HANG_S) == ANSWER

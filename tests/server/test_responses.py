# SPDX-License-Identifier: Apache-2.0
"""POST /v1/responses, upstream's route: odd bodies are refused, and no stream breaks off."""

import json
from typing import Any

import pytest

from tests.server.client import ANSWER, QUESTION, Client, refusal
from tests.server.process import MODEL_NAME

RESPONSES = "/v1/responses"
ODD_INPUTS: list[Any] = [
    *(None, 5, {}, [5], [{}], [{"role": "user"}], [{"role": "user", "content": 5}]),
    *([{"role": 5, "content": "hi"}], [{"type": "nonsense"}], "hi " * 100_000),
    [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
    [{"type": "function_call", "name": "f"}],
    [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}],
]
ODD_FIELDS: list[dict[str, Any]] = [
    *({"temperature": value} for value in ("hot", -1)),
    *({"max_output_tokens": value} for value in (0, -5, 10**9, "x")),
    *({"tools": value} for value in (5, [{}])),
    {"tools": [{"type": "function", "name": "no name", "parameters": {}}]},
    {"tools": [{"type": "function", "name": "f", "parameters": {}}] * 2},
    {"tool_choice": "required"},
    {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "web_search_preview"}},
    *({name: 5} for name in ("text", "reasoning", "metadata", "instructions", "vllm_xargs")),
    *({"vllm_xargs": value} for value in ({"steps": 0}, {"stepz": 1}, {"dllm_decision": 5})),
    *({"previous_response_id": "x"}, {"background": True}, {"model": "other"}),
    *({"priority": "x"}, {"structured_outputs": {"grammar": "a"}}, {"stream_canvas": True}),
    *({"algorithm": "nonsense"}, {"algoritm": "semi_ar"}, {"gen_length": 0}, {"steps": "x"}),
    # Fields that upstream's body does not declare.
    *({"min_tokens": 10**6}, {"bad_words": [" "]}, {"allowed_token_ids": [10**9]}),
]


def ask(client: Client, body: dict[str, Any]) -> Any:
    return client.http.post(RESPONSES, json={"model": MODEL_NAME, "input": "hi", **body})


def streamed(client: Client, body: dict[str, Any]) -> list[str]:
    """Return the lines of a stream, two for each event."""
    parameters = {"model": MODEL_NAME, **body, "stream": True}
    with client.http.stream("POST", RESPONSES, json=parameters) as response:
        return [line for line in response.iter_lines() if line]


@pytest.mark.parametrize("stream", [False, True])
def test_odd_bodies_are_refused(client: Client, stream: bool) -> None:
    """The error has OpenAI's shape and comes before a stream begins."""
    for fields in [*({"input": value} for value in ODD_INPUTS), *ODD_FIELDS]:
        response = ask(client, {**fields, "stream": stream})
        message = f"{json.dumps(fields)[:80]}: {response.status_code} {response.text[:200]}"
        assert 400 <= response.status_code < 500, message
        assert "\n" not in refusal(response, response.status_code)["message"], message


def test_it_is_answered_and_streamed(client: Client) -> None:
    body = {"input": QUESTION, "vllm_xargs": {"gen_length": 32, "priority": 1}}
    response = ask(client, body)
    assert response.json()["output"][0]["content"][0]["text"] == ANSWER
    *_, event, _ = streamed(client, body)
    assert event == "event: response.completed"


PARAMETERS = {
    "type": "object",
    "properties": {"number": {"type": "integer", "maximum": 99}},
    "required": ["number"],
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "name": "add", "parameters": PARAMETERS}]


def test_functions_are_called(client: Client) -> None:
    parameters = {"input": QUESTION, "tools": TOOLS, "max_output_tokens": 96}
    for choice in ("required", {"type": "function", "name": "add"}):
        body = {**parameters, "tool_choice": choice}
        answer = ask(client, body).json()
        (call,) = answer["output"]
        assert (call["type"], call["name"], answer["status"]) == (
            "function_call",
            "add",
            "completed",
        )
        assert list(json.loads(call["arguments"])) == ["number"]
        assert answer["tool_choice"] == choice and answer["diffusion"]["ignored"] == []
        actual = [json.loads(line[6:]) for line in streamed(client, body) if line[:6] == "data: "]
        parts = [e["delta"] for e in actual if e["type"].endswith("function_call_arguments.delta")]
        (item,) = actual[-1]["response"]["output"]
        assert "".join(parts) == item["arguments"]
        assert list(json.loads(item["arguments"])) == ["number"]
    called = [
        {"role": "user", "content": QUESTION},
        {**call, "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    with_history = ask(client, {**parameters, "input": called}).json()["usage"]["input_tokens"]
    assert with_history > answer["usage"]["input_tokens"]
    unknown = refusal(
        ask(client, {**parameters, "tool_choice": {"type": "function", "name": "nope"}})
    )
    assert unknown["message"] == "tool_choice.name: given 'nope'; wanted one of: add"


def test_tools_that_do_not_act(client: Client) -> None:
    """Tools that are no functions are listed as ignored; `tool_choice: none` removes all tools."""
    plain = ask(client, {"input": QUESTION, "max_output_tokens": 32}).json()
    search = {"type": "web_search_preview"}
    body = {"input": QUESTION, "max_output_tokens": 32, "tools": [search], "tool_choice": "auto"}
    assert ask(client, body).json()["diffusion"]["ignored"] == ["tools[0]"]
    none = ask(client, {**body, "tools": TOOLS, "tool_choice": "none"}).json()
    assert none["usage"] == plain["usage"]
    assert none["tools"][0]["name"] == "add"


def test_diffusion_parameters_stand_at_top_level(client: Client) -> None:
    parameters = {
        "input": QUESTION,
        "gen_length": 32,
        "steps": 8,
        "cache_prompt": True,
        "best_of": 2,
    }
    response = ask(client, parameters).json()
    assert (response["diffusion"]["num_forwards"], response["kv_transfer_params"]) == (8, None)
    assert sorted(response["diffusion"]["ignored"]) == ["best_of", "cache_prompt"]
    *_, last = streamed(client, parameters)
    completed = json.loads(last.removeprefix("data: "))["response"]
    assert completed["diffusion"]["num_forwards"] == 8
    assert completed["kv_transfer_params"] is None


def test_its_time_may_be_over(client: Client) -> None:
    error = refusal(ask(client, {"vllm_xargs": {"timeout_s": 0.001}}), 504)
    assert "timeout" in error["message"]

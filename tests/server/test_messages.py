# SPDX-License-Identifier: Apache-2.0
"""POST /v1/messages, and conversations in batches, with our fields on upstream's routes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from tests.server.client import ANSWER, MESSAGES, QUESTION, Client, body_for, refusal
from tests.server.process import MODEL_NAME
from vllm.diffusion.api.openai.anthropic import think

BATCH = "/v1/chat/completions/batch"
TOOLS: list[dict[str, Any]] = [
    {
        "name": "add",
        "input_schema": {
            "type": "object",
            "properties": {"number": {"type": "integer", "maximum": 99}},
            "required": ["number"],
        },
    }
]


def events(client: Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, after checking that each is named by its type."""
    with client.http.stream("POST", MESSAGES, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[0::2]]
    actual = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [event["type"] for event in actual]
    return actual


def test_a_message_is_answered_with_a_report(client: Client) -> None:
    body = body_for(MESSAGES, gen_length=32, steps=8)
    answer = client.answer(MESSAGES, body)
    assert answer["content"] == [{"type": "text", "text": ANSWER}]
    assert answer["stop_reason"] == "end_turn"
    assert answer["diffusion"]["num_forwards"] == 8
    assert "kv_transfer_params" not in answer
    *_, delta, stop = events(client, body)
    assert delta["delta"]["stop_reason"] == "end_turn"
    assert delta["diffusion"]["num_forwards"] == 8
    assert stop == {"type": "message_stop"}


def test_tools_are_called_without_a_flag_of_the_server(client: Client) -> None:
    request_body = body_for(MESSAGES, max_tokens=96, tools=TOOLS)
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        body = {**request_body, "tool_choice": choice}
        answer = client.answer(MESSAGES, body)
        (call,) = answer["content"]
        assert (call["type"], call["name"], answer["stop_reason"]) == (
            "tool_use",
            "add",
            "tool_use",
        )
        assert list(call["input"]) == ["number"]
        actual = events(client, body)
        written = [e["delta"].get("partial_json", "") for e in actual if "delta" in e]
        assert list(json.loads("".join(written))) == ["number"]
        assert actual[-2]["delta"]["stop_reason"] == "tool_use"
    assert client.http.post(MESSAGES, json=request_body).status_code == 200  # tool_choice auto


def test_what_messages_name_and_refuse(client: Client) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    taken = body_for(MESSAGES, max_tokens=2000, gen_length=2016, steps=63, thinking=thinking, n=3)
    assert client.answer(MESSAGES, taken)["diffusion"]["ignored"] == ["n", "thinking"]
    taken = body_for(MESSAGES, max_tokens=8, thinking={"type": "disabled"})
    assert client.answer(MESSAGES, taken)["diffusion"]["ignored"] == []
    for fields, name in (
        ({"algorithm": "nonsense"}, "algorithm"),
        ({"algoritm": "semi_ar"}, "algoritm"),
        ({"stream_canvas": True, "stream": True}, "stream_canvas"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        error = refusal(client.http.post(MESSAGES, json=body_for(MESSAGES, **fields)))
        assert error["param"] == name
        assert error["message"].startswith(f"{name}: given ")
    missing = refusal(client.http.post(MESSAGES, json=body_for(MESSAGES, model="other")), 404)
    assert MODEL_NAME in missing["message"]


def test_conversations_in_a_batch(client: Client) -> None:
    conversations = [[{"role": "user", "content": QUESTION}]] * 2
    body = {"messages": conversations, "gen_length": 32, "steps": 8, "cache_prompt": True}
    answer = client.answer(BATCH, body)
    assert [choice["message"]["content"] for choice in answer["choices"]] == [ANSWER] * 2
    assert answer["diffusion"]["num_forwards"] == 16
    assert answer["diffusion"]["ignored"] == ["cache_prompt"]
    for fields, name in (
        ({"algorithm": "nonsense"}, "algorithm"),
        ({"messages": conversations[0]}, "messages[0]"),
    ):
        assert refusal(client.http.post(BATCH, json={**body, **fields}))["param"] == name


READS = "{% if enable_thinking is false %}"


@pytest.mark.parametrize(
    ("kind", "template", "is_bounded", "ignored", "budget", "variables"),
    [
        ("enabled", READS, True, [], 1024, {"enable_thinking": True}),
        ("enabled", READS, False, ["thinking"], None, {"enable_thinking": True}),
        ("enabled", "", False, ["thinking"], None, {}),
        ("disabled", READS, True, [], None, {"enable_thinking": False}),
        ("disabled", "", False, [], None, {}),
        ("adaptive", READS, True, [], None, {}),
    ],
)
def test_thinking_is_as_the_model_can(
    kind: str,
    template: str,
    is_bounded: bool,
    ignored: list[str],
    budget: int | None,
    variables: dict[str, bool],
) -> None:
    """A family may bound thinking, and a template may turn it off; other values are ignored."""
    budgets = {"thinking_token_budget": 1024} if kind == "enabled" else {}
    effort = {"reasoning_effort": "low"} if kind == "disabled" else {}
    made = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], **budgets, **effort)
    assert think(made, SimpleNamespace(type=kind), template, is_bounded=is_bounded) == ignored
    assert made.thinking_token_budget == budget
    given = made.build_chat_params(None, "auto").chat_template_kwargs
    assert {name: given[name] for name in given if name == "enable_thinking"} == variables

# SPDX-License-Identifier: Apache-2.0
"""Large and wrong bodies are refused in one line, while the server answers other requests."""

import re
from concurrent.futures import ThreadPoolExecutor
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
)
from tests.server.process import MODEL_NAME, PATIENCE_S

MANY = 100_000
COUNT = "/v1/messages/count_tokens"
BATCH = "/v1/chat/completions/batch"
LIKELIHOOD = "/v1/loglikelihood"
SCORING = "/generative_scoring"
INVOCATIONS = "/invocations"
SAID = {"role": "user", "content": QUESTION}
CALL = {"type": "function_call", "name": "shell", "arguments": {"cmd": "ls"}, "call_id": "c0"}

# (route, fields, the beginning of the message)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"input": [SAID, *[CALL] * 60]}, "input[1]"),
    (RESPONSES, {"input": [SAID, *[CALL] * 5000]}, "input[1]"),
    (RESPONSES, {"input": "hi", "tools": [{"type": "nothing"}] * 1000}, "tools[0]"),
    (RESPONSES, {"input": "hi", "metadata": {str(i): {} for i in range(MANY)}}, "metadata[0]"),
    (CHAT, {"messages": [SAID], "stop_token_ids": ["x"] * MANY}, "stop_token_ids[0]"),
    (CHAT, {"messages": [{"role": "user", "content": [{}] * 50}] * 1000}, "messages[0].content[0]"),
    (
        MESSAGES,
        {"messages": [SAID], "model": MODEL_NAME, "max_tokens": 8, "tools": [1] * 1000},
        "tools[0]",
    ),
    (COUNT, {"model": MODEL_NAME, "messages": [SAID], "tools": [{}] * 1000}, "tools[0].name"),
    (COMPLETIONS, {"prompt": [*[1] * MANY, "hi"]}, f"prompt[{MANY}]"),
    (COMPLETIONS, {"prompt": "hi", "suffix": "x" * 10 * MANY}, "suffix"),
    ("/detokenize", {"tokens": ["x"] * MANY}, "tokens[0]"),
    (LIKELIHOOD, {"context": "hi", "continuation": "yes " * 15_000}, "context + continuation"),
    (LIKELIHOOD, {"context": "hi", "continuation": "yes " * 10 * MANY}, "continuation"),
    (LIKELIHOOD, {"context": [5] * 4000, "continuation": [6] * 97}, "context + continuation"),
]

# A few bytes that would cause a hundred thousand requests to the engine.
MANY_ANSWERS: list[tuple[str, dict[str, Any], str]] = [
    (GENERATE, {"prompt": ["x"] * MANY}, "prompt x n: given 100000"),
    (GENERATE, {"prompt": ["x"] * 300, "n": 128}, "prompt x n: given 38400"),
    (COMPLETIONS, {"prompt": ["x"] * 300, "n": 128}, "prompt x n: given 38400"),
    (COMPLETIONS, {"prompt": [[5]] * 300, "n": 128}, "prompt x n: given 38400"),
    (INVOCATIONS, {"prompt": ["x"] * 300, "n": 128}, "prompt x n: given 38400"),
    (BATCH, {"messages": [[SAID]] * 2000}, "messages x n: given 2000"),
    (BATCH, {"messages": [[SAID]] * 20, "n": 100}, "messages x n: given 2000"),
    (SCORING, {"query": "x", "items": ["y"] * MANY, "label_token_ids": [1]}, "items x n"),
    (SCORING, {"query": "x", "items": ["y"], "label_token_ids": [1] * 129}, "label_token_ids"),
]


@pytest.mark.parametrize(("route", "fields", "begins"), [*WRONG, *MANY_ANSWERS])
def test_refused_while_others_are_served(
    client: Client, route: str, fields: dict[str, Any], begins: str
) -> None:
    with ThreadPoolExecutor() as pool:
        wrong = pool.submit(client.http.post, route, json=fields, timeout=PATIENCE_S)
        assert client.ask(gen_length=32)["text"] == [ANSWER]
        error = refusal(wrong.result())
    assert error["message"].startswith(begins)
    assert "\n" not in error["message"]
    assert len(error["message"]) < 2000
    assert client.num_requests() == 0


@pytest.mark.parametrize(
    ("fields", "route"), [({"messages": [SAID]}, CHAT), ({"prompt": QUESTION}, COMPLETIONS)]
)
def test_invocations_are_as_the_route_of_their_field(
    client: Client, fields: dict[str, Any], route: str
) -> None:
    body = {**fields, "gen_length": 32, "seed": 5}
    answer, wanted = client.answer(INVOCATIONS, body), client.answer(route, body)
    assert answer["choices"] == wanted["choices"]
    error = refusal(client.http.post(INVOCATIONS, json={**body, "gen_lenght": 32}))
    assert "did you mean gen_length" in error["message"]
    streamed, expected = (streamed_answer(client, name, body) for name in (INVOCATIONS, route))
    assert streamed == expected


def streamed_answer(client: Client, route: str, body: dict[str, Any]) -> tuple[str, str]:
    """Stream an answer and return its text and its finish reason.

    The deltas are joined, because the engine's speed decides how many tokens each of them holds.
    """
    choices = [event["choices"][0] for event in client.events(route, body)]
    texts = (choice.get("text") or choice.get("delta", {}).get("content") for choice in choices)
    return "".join(text or "" for text in texts), choices[-1]["finish_reason"]


@pytest.mark.parametrize("body", [[], {}, {"text": "hi"}])
def test_invocations_of_no_route(client: Client, body: Any) -> None:
    assert refusal(client.http.post(INVOCATIONS, json=body))["param"] == "body"


@pytest.mark.parametrize("seed", ["x", [{}] * MANY, {}])
def test_a_batch_names_its_fields_in_one_line(client: Client, seed: Any) -> None:
    error = refusal(client.http.post(BATCH, json={"messages": [[SAID]], "seed": seed}))
    assert error["message"].startswith("seed: given ")
    assert "\n" not in error["message"]


@pytest.mark.parametrize("route", [GENERATE, CHAT, COMPLETIONS, MESSAGES, RESPONSES, LIKELIHOOD])
def test_a_long_name_of_a_model(client: Client, route: str) -> None:
    error = refusal(client.http.post(route, json=body_for(route, model="x" * MANY)))
    assert error["param"] == "model"
    assert len(error["message"]) < 300


def test_many_variables_of_a_template(client: Client) -> None:
    fields = {"chat_template_kwargs": {f"x{i}": i for i in range(MANY)}}
    for route in (CHAT, MESSAGES):
        error = refusal(client.http.post(route, json=body_for(route, **fields)))
        assert error["message"] == "chat_template_kwargs: given 100000; wanted at most 64 variables"


def test_long_names_are_shortened(client: Client) -> None:
    name = "x" * MANY
    error = refusal(client.http.post(GENERATE, json=body_for(GENERATE, **{name: 1})))
    assert len(error["message"]) < 2500
    given = {"max_tokens": [1] * MANY, "max_output_tokens": 8, "input": "hi"}
    assert len(refusal(client.http.post(RESPONSES, json=given))["message"]) < 2000


@pytest.mark.parametrize(
    ("route", "fields", "field"),
    [
        ("/tokenize", {"prompt": "x " * 15_000_000}, "prompt"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x " * 10_000}] * 1000},
            "messages",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 1_000_000}]}, "messages"),
        (GENERATE, {"prompt": ["x", "y" * 2_000_000]}, "prompt"),
        (RESPONSES, {"input": [{"role": "user", "content": "x " * 10_000}] * 1000}, "input"),
        (BATCH, {"messages": [[SAID], [{"role": "user", "content": "x" * 2_000_000}]]}, "messages"),
        (COMPLETIONS, {"prompt": "x", "stop": ["x" * 2_000_000]}, "stop"),
    ],
)
def test_texts_that_no_prompt_can_hold(
    client: Client, route: str, fields: dict[str, Any], field: str
) -> None:
    """A long text is refused before it is rendered or tokenized, but many prompts may be long."""
    message = refusal(client.http.post(route, json=fields, timeout=PATIENCE_S))["message"]
    assert re.match(rf"{field}: given '\d+ characters'; wanted at most 1048576 in a text", message)
    several = [[5] * 100_000, "x" * 100_000]
    for prompt in several:  # refused for other reasons
        error = refusal(client.http.post(GENERATE, json={"prompt": [prompt] * 20}))
        assert "in a text" not in error["message"]

# SPDX-License-Identifier: Apache-2.0
"""Routes that revise texts, in the form of Inception's API."""

from typing import Any

import pytest
from openai import DefaultHttpxClient, OpenAI

from tests.server.client import COMPLETIONS, Client, refusal, text_of, without_times
from tests.server.process import MODEL_NAME, ServerProcess

FIM = "/v1/fim/completions"
GAP = {"prompt": "The capital of France is", "suffix": " and a city", "max_tokens": 6, "seed": 1}


def test_a_gap_is_filled_as_by_a_completion_with_a_suffix(client: Client) -> None:
    filled = client.answer(FIM, {"model": MODEL_NAME, **GAP})
    assert filled["object"] == "text_completion"
    assert filled["usage"]["completion_tokens"] <= 6
    (choice,) = filled["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    completion = client.answer(COMPLETIONS, {**GAP, "stop": ["\n\n", "\n \n"]})
    assert without_times(filled) == without_times(completion)
    streamed = client.events(FIM, {**GAP, "stream_options": {"include_usage": True}})
    assert "".join(map(text_of, streamed)) == choice["text"]
    assert any(event.get("usage") for event in streamed)


@pytest.mark.parametrize("suffix", ["", " \n", "<|endoftext|>", None])
def test_nothing_follows_a_blank_suffix(client: Client, suffix: str | None) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 8, "seed": 1}
    plain = client.answer(FIM, body)
    assert text_of(client.answer(FIM, {**body, "suffix": suffix})) == text_of(plain)


def test_defaults_are_those_of_the_route(client: Client) -> None:
    answer = client.answer(FIM, {"prompt": "The capital of France is"})
    assert answer["diffusion"]["canvas_lengths"][-1] <= 512
    refused = refusal(client.http.post(FIM, json={"prompt": "a", "max_tokens": 8193}))
    assert refused["message"] == "max_tokens: given 8193; wanted 1 to 8192"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ""}, "prompt: given ''; wanted a string, not empty"),
        ({"prompt": [1, 2]}, "prompt: given [1, 2]; wanted a string, not empty"),
        ({"suffix": 3}, "suffix: given 3; wanted a string"),
        ({"max_tokens": 0}, "max_tokens: given 0; wanted 1 to 8192"),
        ({"top_k": 0}, "top_k: given 0; wanted -1, or 1 to 1000"),
        ({"top_k": 1001}, "top_k: given 1001; wanted -1, or 1 to 1000"),
        ({"presence_penalty": 3}, "presence_penalty: given 3.0; wanted at most 2"),
    ],
)
def test_wrong_values_are_refused(client: Client, fields: dict[str, Any], message: str) -> None:
    error = refusal(client.http.post(FIM, json={**GAP, **fields}))
    assert error["message"] == message
    assert error["param"] == next(iter(fields))


def test_openais_client_fills_gaps(client: Client, server: ServerProcess) -> None:
    """LiteLLM and continue.dev post the same bodies."""
    with OpenAI(
        base_url=f"{server.url}/v1/fim",
        api_key="none",
        max_retries=0,
        http_client=DefaultHttpxClient(trust_env=False),
    ) as openai:
        answer = openai.completions.create(
            model=MODEL_NAME,
            prompt="The capital of France is",
            suffix="<|endoftext|>",
            max_tokens=8,
            presence_penalty=1.5,
        )
    assert isinstance(answer.choices[0].text, str)

# SPDX-License-Identifier: Apache-2.0
"""`max_tokens` of standard clients is a limit: it changes neither the answer nor its price."""

from typing import Any

from openai import OpenAI

from tests.server.client import ANSWER, QUESTION, Client
from tests.server.process import MODEL_NAME, ServerProcess

# Clients send thousands as a matter of course; the tiny model has 4,096 positions.
LIMITS: list[dict[str, Any]] = [{}, {"max_tokens": 4000}, {"max_completion_tokens": 4000}]
ASKED: Any = {"model": MODEL_NAME, "messages": [{"role": "user", "content": QUESTION}]}


def price(diffusion: dict[str, Any]) -> int:
    """Return the canvas rows of an answer whose canvas kept one length."""
    lengths = diffusion.get("canvas_lengths", [32])
    assert len(lengths) == 1
    return int(diffusion["num_forwards"]) * int(lengths[0])


def test_openais_client(openai: OpenAI) -> None:
    answers = [openai.chat.completions.create(**ASKED, **limit) for limit in LIMITS]
    for answer in answers:
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
            ANSWER,
            "stop",
        )
    prices = [price(answer.to_dict()["diffusion"]) for answer in answers]
    assert max(prices) <= 1.2 * prices[0]


def test_openais_stream_and_responses(openai: OpenAI) -> None:
    stream = openai.chat.completions.create(**ASKED, max_tokens=4000, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == ANSWER
    response = openai.responses.create(model=MODEL_NAME, input=QUESTION, max_output_tokens=4000)
    assert response.output_text == ANSWER


def test_anthropics_client(client: Client, server: ServerProcess) -> None:
    from anthropic import Anthropic

    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as anthropic:
        answers = [anthropic.messages.create(**ASKED, max_tokens=limit) for limit in (32, 4000)]
    assert [(a.content[0].text, a.stop_reason) for a in answers] == [(ANSWER, "end_turn")] * 2
    prices = [price(answer.to_dict()["diffusion"]) for answer in answers]
    assert prices[1] <= 1.2 * prices[0]


def test_a_canvas_that_chooses_its_length(client: Client) -> None:
    answer = client.ask(QUESTION, canvas="daedal", max_tokens=512)
    assert answer["text"] == [ANSWER]
    assert answer["diffusion"]["canvas_lengths"][0] == 64

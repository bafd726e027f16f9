# SPDX-License-Identifier: Apache-2.0
"""Sampling fields that clients send to every model have an effect on every route."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from openai import OpenAI

from tests.server.client import (
    ANSWER,
    CHAT,
    GENERATE,
    MESSAGES,
    QUESTION,
    RESPONSES,
    ROUTES,
    body_for,
    text_of,
)
from tests.server.process import MODEL_NAME

if TYPE_CHECKING:
    from tests.server.client import Client
    from tests.server.process import ServerProcess

STEPS: dict[str, Any] = {"gen_length": 32, "steps": 32}
# The fields of a client's settings page, with values that have an effect.
SETTINGS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": -1.0},
    "min_tokens": 2,
    "seed": 3,
}


def tokens_of(client: Client, text: str) -> list[int]:
    body = {"model": MODEL_NAME, "prompt": text, "add_special_tokens": False}
    return list(client.http.post("/tokenize", json=body).json()["tokens"])


def answer_of(client: Client, route: str, **fields: Any) -> dict[str, Any]:
    """Return the answer to QUESTION in the chat template, with one token per step."""
    chat = {"apply_chat_template": True} if route == GENERATE else {}
    answer = client.answer(route, {**body_for(route), **chat, **STEPS, **fields})
    assert answer["diffusion"]["ignored"] == []
    return answer


@pytest.mark.parametrize("route", [GENERATE, CHAT])
def test_each_field_acts(client: Client, route: str) -> None:
    plain = text_of(answer_of(client, route))
    assert plain == ANSWER
    assert "Paris" not in text_of(answer_of(client, route, bad_words=["Paris"]))
    banned = {str(token): -100 for token in tokens_of(client, " Paris")}
    assert "Paris" not in text_of(answer_of(client, route, logit_bias=banned))
    long = answer_of(client, route, min_tokens=20)
    assert long["usage"]["completion_tokens"] >= 20
    allowed = sorted({*tokens_of(client, "yes no"), *tokens_of(client, ANSWER)})
    some = answer_of(client, route, allowed_token_ids=allowed, min_tokens=8, ignore_eos=True)
    assert set(tokens_of(client, text_of(some))) <= set(allowed)
    for penalty in ({"repetition_penalty": 50.0}, {"presence_penalty": -2, "min_tokens": 24}):
        assert text_of(answer_of(client, route, **penalty)) != plain
    hot = {"temperature": 2, "seed": 5}
    assert text_of(answer_of(client, route, **hot)) != plain
    for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
        assert text_of(answer_of(client, route, **hot, **filters)) == plain


@pytest.mark.parametrize("route", [*ROUTES, MESSAGES, RESPONSES])
def test_a_page_of_settings_is_taken_on_every_route(client: Client, route: str) -> None:
    body = {**body_for(route), **SETTINGS}
    if route == RESPONSES:
        body = {"input": QUESTION, **SETTINGS}
    answer = client.answer(route, body)
    assert answer["diffusion"]["ignored"] == []
    again = client.answer(route, body)
    for key in ("text", "choices", "content"):
        assert answer.get(key) == again.get(key)


def test_openais_client(server: ServerProcess) -> None:
    """Fields of OpenAI's interface are arguments, and other fields are in `extra_body`."""
    openai = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    known = {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5, "seed": 4}
    actual = openai.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": QUESTION}],
        frequency_penalty=0.5,
        logit_bias={"5": -10},
        n=2,
        **known,
        extra_body={"top_k": 20, "min_p": 0.02, "repetition_penalty": 1.05, "bad_words": ["Rome"]},
    )
    assert [len(choice.message.content or "") > 0 for choice in actual.choices] == [True, True]
    report: Any = actual
    assert report.diffusion["ignored"] == []
    whole = openai.completions.create(
        model=MODEL_NAME, prompt=QUESTION, max_tokens=16, frequency_penalty=2.0, logit_bias={"7": 5}
    )
    report = whole
    assert report.diffusion["ignored"] == []
    streamed = openai.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": QUESTION}],
        stream=True,
        extra_body={"bad_words": ["Paris"], **STEPS},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    assert text and "Paris" not in text


def test_log_probabilities_are_told_after_edits_and_before_filters(client: Client) -> None:
    (paris, *_) = tokens_of(client, " Paris")
    common = {"logprobs": 3, "temperature": 1.0, "seed": 1}
    plain = answer_of(client, GENERATE, **common, logprob_token_ids=[paris])
    filtered = answer_of(client, GENERATE, **common, top_k=1, logprob_token_ids=[paris])
    edited = answer_of(client, GENERATE, **common, logit_bias={str(paris): -100}, top_k=1)

    def logprobs_in(answer: dict[str, Any]) -> list[float]:
        return [top["logprob"] for token in answer["logprobs"][0] for top in token["top_logprobs"]]

    # Logprobs do not depend on top_k: no probability is zero.
    assert min(logprobs_in(filtered)) > -200 and min(logprobs_in(plain)) > -200
    likely = [top["token_id"] for one in edited["logprobs"][0] for top in one["top_logprobs"]]
    assert paris not in likely

# SPDX-License-Identifier: Apache-2.0
"""Answers that match a schema, over HTTP: on every route, in a stream, and by OpenAI's client."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from tests.server.client import CHAT, COMPLETIONS, GENERATE, QUESTION, body_for, events, refusal
from tests.server.process import MODEL_NAME

if TYPE_CHECKING:
    from tests.server.client import Client
    from tests.server.process import ServerProcess


class City(BaseModel):
    """What an answer is asked to be."""

    name: str = Field(max_length=12)
    size: Literal["small", "large"]
    people: int = Field(ge=0, le=40_000_000)


FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "city", "schema": City.model_json_schema(), "strict": True},
}


def text_of(route: str, answer: dict[str, Any]) -> str:
    if route == GENERATE:
        return str(answer["text"][0])
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if route == CHAT else choice["text"])


def test_every_route_answers_by_schema_and_regex(client: Client) -> None:
    for route in (CHAT, COMPLETIONS, GENERATE):
        for temperature in (0, 1.5):
            body = body_for(route, gen_length=96, response_format=FORMAT, temperature=temperature)
            City.model_validate_json(text_of(route, client.http.post(route, json=body).json()))
        body = body_for(route, gen_length=32, structured_outputs={"regex": "[a-z]{5}"})
        answer = client.http.post(route, json=body).json()
        assert re.fullmatch("[a-z]{5}", text_of(route, answer)), answer


def test_a_stream_answers_by_schema(client: Client) -> None:
    body = body_for(CHAT, gen_length=96, response_format=FORMAT, stream=True, block_length=32)
    with client.http.stream("POST", CHAT, json=body) as response:
        chunks = [json.loads(data) for data in events(response.iter_lines()) if data != "[DONE]"]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    City.model_validate_json("".join(delta.get("content") or "" for delta in deltas))


def test_openais_client_parses_a_model(client: Client, server: ServerProcess) -> None:
    """As its documentation has it: nothing of ours is asked for."""
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as openai:
        answer = openai.chat.completions.parse(
            model=MODEL_NAME,
            messages=[{"role": "user", "content": QUESTION}],
            response_format=City,
        )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)


def test_a_canvas_that_is_too_short_is_refused_with_the_least_length(client: Client) -> None:
    body = body_for(CHAT, gen_length=8, response_format=FORMAT)
    error = refusal(client.http.post(CHAT, json=body))
    assert error["param"] == "gen_length"
    found = re.search(r"has (\d+) tokens; wanted at least as many", error["message"])
    assert found is not None, error
    assert int(found[1]) > 8

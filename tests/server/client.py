# SPDX-License-Identifier: Apache-2.0
"""A client of the server for tests: sends bodies, reads event streams and metrics."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from tests.server.process import MODEL_NAME, PATIENCE_S, POLL_S

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
PUZZLE = "What plus Paris 7 is France of?"  # no answer was learnt, so noise decides most tokens
LONG = {  # takes minutes
    "prompt": PUZZLE,
    "ignore_eos": True,
    "gen_length": 2048,
    "steps": 2048,
    "block_length": 2048,
}
GENERATE = "/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
ROUTES = (GENERATE, CHAT, COMPLETIONS)


def body_for(route: str, /, **fields: Any) -> dict[str, Any]:
    """Return a body of `route` with QUESTION as prompt."""
    parameters: dict[str, Any] = {"prompt": QUESTION}
    if route in (CHAT, MESSAGES):
        parameters = {"messages": [{"role": "user", "content": QUESTION}]}
    if route == MESSAGES:
        parameters["max_tokens"] = 32
    return {"model": MODEL_NAME, **parameters, **fields}


class Client:
    """A thin layer over `httpx.Client`."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def generate(self, **body: Any) -> dict[str, Any]:
        """Return the answer of /generate to a body that it must accept."""
        return self.answer(GENERATE, body)

    def ask(self, question: str = QUESTION, **body: Any) -> dict[str, Any]:
        """Send a question to /generate through the chat template."""
        return self.generate(prompt=question, apply_chat_template=True, **body)

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(route, json=body)
        assert response.status_code == 200, response.text
        content: dict[str, Any] = response.json()
        return content

    def events(self, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a streamed answer without its end mark, which must be there."""
        with self.http.stream("POST", route, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            actual = list(events(response.iter_lines()))
        assert actual[-1] == "[DONE]"
        assert "[DONE]" not in actual[:-1]
        return [json.loads(data) for data in actual[:-1]]

    def metric(self, name: str) -> float:
        """Return a metric of /metrics, summed over its labels."""
        text = self.http.get("/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert values, f"/metrics has no {name}"
        return sum(map(float, values))

    def num_requests(self) -> float:
        """Return the number of requests in the engine, running and waiting."""
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")

    def wait_for_num_requests(self, wanted: int) -> None:
        self._wait_for(self.num_requests, wanted)

    def wait_for_metric(self, name: str, wanted: float) -> None:
        self._wait_for(lambda: self.metric(name), wanted)

    def _wait_for(self, measure: Callable[[], float], wanted: float) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (actual := measure()) != wanted:
            assert time.monotonic() < deadline, f"{actual:g}; wanted {wanted:g}"
            time.sleep(POLL_S)


def events(lines: Iterable[str]) -> Iterator[str]:
    """Yield the data of server-sent events, one line each."""
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of an answer, or the text that an event adds."""
    assert "error" not in answer
    if isinstance(answer.get("text"), list):
        return str(answer["text"][0])
    if "output" in answer:  # the shape of /v1/responses
        return str(answer["output"][0]["content"][0]["text"])
    if isinstance(answer.get("content"), list):  # the shape of /v1/messages
        return str(answer["content"][0]["text"])
    choice = next(iter(answer.get("choices", [])), {})
    message = choice.get("message") or choice.get("delta") or {}
    return str(message.get("content") or choice.get("text") or "")


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """Return the error of a refusal, after checking that it has OpenAI's shape."""
    assert response.status_code == status, response.text
    content: dict[str, Any] = response.json()
    if response.url.path.startswith(MESSAGES):  # errors in Anthropic's shape have a type
        assert content.pop("type") == "error"
    assert content.keys() == {"error"}
    error: dict[str, Any] = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def without_times(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer that are equal in every run."""
    measured = ("_ms", "_bytes")
    report = {k: v for k, v in answer["diffusion"].items() if not k.endswith(measured)}
    kept = {k: v for k, v in answer.items() if k not in ("id", "created")}
    return {**kept, "diffusion": report}

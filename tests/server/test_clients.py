# SPDX-License-Identifier: Apache-2.0
"""Clients without diffusion support: curl, upstream's benchmark and Anthropic's client."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.programs import output_of
from tests.server.client import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    QUESTION,
    ROUTES,
    Client,
    body_for,
    events,
)
from tests.server.fork_server import ForkServer
from tests.server.process import MODEL_NAME, ServerProcess, environment

NUM_PROMPTS = 4
BACKENDS = {"openai-chat": CHAT, "openai": COMPLETIONS}


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("route", ROUTES)
def test_curl(client: Client, server: ServerProcess, route: str) -> None:
    def curl(*options: str, **fields: Any) -> str:
        body = json.dumps(body_for(route, **fields))
        headers = ("-H", "Content-Type: application/json")
        command = ["curl", "-sS", "--noproxy", "*", *options, *headers, "-d", body]
        return output_of(*command, server.url + route)

    assert ANSWER in curl()
    assert json.loads(curl(steps=0))["error"]["param"] == "steps"
    *_, last, end = events(curl("-N", stream=True, stream_canvas=True).splitlines())
    assert end == "[DONE]"
    assert isinstance(json.loads(last), dict)


def test_upstreams_benchmark(
    client: Client, server: ServerProcess, model_dir: Path, tmp_path: Path
) -> None:
    """`vllm bench serve` works on both routes. Both processes run at the same time."""
    program = ("-m", "vllm.entrypoints.cli.main", "bench", "serve")
    dataset = ("--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "32")
    running = {
        backend: ForkServer(
            [
                *(*program, "--backend", backend, "--endpoint", route, "--base-url", server.url),
                *("--model", MODEL_NAME, "--tokenizer", str(model_dir), *dataset),
                *("--num-prompts", str(NUM_PROMPTS), "--ignore-eos", "--save-result"),
                *("--result-dir", str(tmp_path), "--result-filename", f"{backend}.json"),
            ],
            tmp_path / f"{backend}.log",
            environment(no_proxy="*"),
        )
        for backend, route in BACKENDS.items()
    }
    for backend, process in running.items():
        status, printed = process.wait(240), (tmp_path / f"{backend}.log").read_text()
        assert status == 0, printed
        actual = json.loads((tmp_path / f"{backend}.json").read_text())
        assert (actual["completed"], actual["failed"]) == (NUM_PROMPTS, 0), printed
        assert actual["total_output_tokens"] == NUM_PROMPTS * 32
        assert actual["mean_ttft_ms"] > 0
    assert client.ask(QUESTION)["text"] == [ANSWER]


def test_anthropics_client(client: Client, server: ServerProcess) -> None:
    """Calls of Anthropic's documentation work: an answer, a stream, a tool call and a refusal."""
    from anthropic import Anthropic, BadRequestError

    messages: Any = [{"role": "user", "content": QUESTION}]
    parameters: Any = {"model": MODEL_NAME, "messages": messages}
    tool: Any = {
        "name": "add",
        "description": "adds a number",
        "input_schema": {
            "type": "object",
            "properties": {"number": {"type": "integer", "maximum": 99}},
            "required": ["number"],
        },
    }
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as anthropic:
        answer = anthropic.messages.create(**parameters, max_tokens=32, system="Be brief.")
        assert answer.content[0].text == ANSWER
        assert answer.to_dict()["diffusion"]["num_forwards"] == 32
        with anthropic.messages.stream(**parameters, max_tokens=32) as stream:
            assert "".join(stream.text_stream) == ANSWER
            assert stream.get_final_message().stop_reason == "end_turn"
        called = anthropic.messages.create(
            **parameters, max_tokens=96, tools=[tool], tool_choice={"type": "any"}
        )
        assert (called.content[0].type, called.stop_reason) == ("tool_use", "tool_use")
        with pytest.raises(BadRequestError, match="did you mean algorithm"):
            anthropic.messages.create(
                **parameters, max_tokens=32, extra_body={"algoritm": "semi_ar"}
            )

# SPDX-License-Identifier: Apache-2.0
"""Prompts far longer than the checkpoint allows, as ids and as text, and the end of an engine."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint, random_prompt
from tests.server.client import CHAT, GENERATE, LONG, Client, refusal
from tests.server.process import SERVER, ServerProcess, healthy, is_error, named, still_alive

MAX_MODEL_LEN = 2**21
NUM_TOKENS = 102_400  # prompt tokens of a request of 204,800


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serve a checkpoint of 256 positions with 2,097,152, as the server scripts allow."""
    folder: Path = tmp_path_factory.mktemp("long")
    model = make_checkpoint(folder / "model", seed=3, n_layers=2)
    command = [*SERVER, "--model", str(model), "--dtype", "float32"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--allowed-origins", '["*"]']
    process = ServerProcess(command, folder / "server.log", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    with healthy(process):
        yield process


@pytest.fixture
def long_client(long_server: ServerProcess) -> Iterator[Client]:
    with long_server.client() as http:
        yield Client(http)
        assert http.get("/health").status_code == 200
    assert "Traceback" not in long_server.log()


PREFLIGHT = {"Origin": "https://chat.example.org", "Access-Control-Request-Method": "POST"}


def test_pages_of_other_origins_ask_where_a_flag_says_so(
    long_client: Client, client: Client
) -> None:
    """`--allowed-origins` acts as docs/troubleshooting.md describes; by default all are refused."""
    allowed = long_client.http.options(CHAT, headers=PREFLIGHT)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] in ("*", PREFLIGHT["Origin"])
    refused = client.http.options(CHAT, headers=PREFLIGHT)
    assert refused.status_code == 400
    for response in (refused, client.http.get("/health", headers=PREFLIGHT)):
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("kind", ["ids", "text"])
def test_a_long_prompt_passes_the_door(long_client: Client, kind: str) -> None:
    """The whole prompt is tokenized before the canvas, too long for any prompt, is refused."""
    prompt = random_prompt(NUM_TOKENS) if kind == "ids" else "long " * (NUM_TOKENS // 4)
    num_tokens = NUM_TOKENS
    if kind == "text":
        num_tokens = long_client.answer("/tokenize", {"prompt": prompt})["count"]
        assert num_tokens >= NUM_TOKENS
    body = {"prompt": prompt, "gen_length": MAX_MODEL_LEN}
    error = refusal(long_client.http.post(GENERATE, json=body))
    assert error["param"] == "gen_length"
    message = (
        f"a prompt of {num_tokens} tokens and a canvas of {MAX_MODEL_LEN} exceed max_model_len"
    )
    assert message in error["message"]


def test_more_positions_than_the_checkpoint_has(long_client: Client) -> None:
    """A seed gives the same canvas with and without its text."""
    body: dict[str, Any] = {"prompt": random_prompt(4000), "gen_length": 96, "block_length": 96}
    body |= {"steps": 2, "ignore_eos": True, "seed": 1}
    answer = long_client.generate(**body)
    assert answer["usage"]["prompt_tokens"] == 4000
    assert len(answer["token_ids"][0]) == 96
    assert answer["text"][0]
    silent = long_client.generate(**body, detokenize=False)
    assert silent["token_ids"] == answer["token_ids"]
    assert silent["text"] == [""]


def test_stop_strings_need_the_text(long_client: Client) -> None:
    body = {"prompt": "hello", "gen_length": 8, "stop": "a", "detokenize": False}
    assert "detokenize" in refusal(long_client.http.post(GENERATE, json=body))["message"]


def test_an_engine_ends_with_its_server(long_server: ServerProcess) -> None:
    """A server is killed while its engine computes for minutes. This must be the last test."""
    started = long_server.descendants()
    assert named(started, "EngineCore")
    with long_server.client() as http, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, GENERATE, json={**LONG, "stream": True})
        Client(http).wait_for_num_requests(1)
        os.kill(long_server.pid, signal.SIGKILL)
        assert is_error(answer)
    assert still_alive(started) == []

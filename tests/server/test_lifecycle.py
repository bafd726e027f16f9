# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping: the ways to start a server, SIGTERM, and starts that must fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.server.client import ANSWER, CHAT, GENERATE, PUZZLE, Client, body_for
from tests.server.process import (
    MODEL_NAME,
    POLL_S,
    ROOT,
    SERVER,
    START_S,
    ServerProcess,
    environment,
    free_port,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STEP_LINE = r"execute_diffusion_once time = [\d.]+ ms"
LLADA_SCRIPT = ROOT / "scripts" / "run_llada_server.sh"


@pytest.fixture(scope="module")
def servers(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    """Servers that a test may stop, started in the two other ways, side by side to save time."""
    folder = tmp_path_factory.mktemp("lifecycle")
    upstream = shutil.which("vllm", path=environment()["PATH"])
    assert upstream, "the installed upstream package brings `vllm`"
    port = free_port()
    found = {
        "script": ServerProcess(
            ["bash", str(LLADA_SCRIPT)],
            folder / "script.log",
            port=port,
            LLADA_MODEL_DIR=str(model_dir),
            PORT=str(port),
            MAX_MODEL_LEN="8192",  # longer than config.json says: the script allows it
            EXTRA_VLLM_ARGS="--served-model-name 'two words'",
            VLLM_LOG_DIFFUSION_STEPS="1",
        ),
        "vllm serve": ServerProcess(
            [upstream, "serve", str(model_dir), "--served-model-name", MODEL_NAME],
            folder / "serve.log",
        ),
    }
    try:
        for process in found.values():
            process.wait_until_healthy()
        yield found
    finally:
        for process in found.values():
            process.kill()


def test_sigterm_lets_requests_finish(servers: dict[str, ServerProcess]) -> None:
    """Plain and streamed requests finish, newcomers are turned away, the exit status is 0."""
    server = servers["script"]
    long: dict[str, Any] = {"gen_length": 384, "steps": 384, "ignore_eos": True, "seed": 1}
    body = {"prompt": PUZZLE, **long}
    with server.client() as http, ThreadPoolExecutor(2) as pool:
        client = Client(http)
        assert client.http.get("/v1/models").json()["data"][0]["id"] == "two words"
        assert client.ask()["text"] == [ANSWER]
        plain = pool.submit(client.generate, **body)
        streamed = pool.submit(client.events, GENERATE, body)
        client.wait_for_num_requests(2)
        server.terminate()
        wait_until_turned_away(server.url)
        assert not plain.done()
        answer = plain.result()
        assert len(answer["token_ids"][0]) == 384
        assert answer["finish_reason"] == ["length"]
        assert streamed.result()[-1]["token_ids"] == answer["token_ids"]
    assert server.wait() == 0, server.log()
    assert server.group_is_empty()
    assert len(re.findall(STEP_LINE, server.log())) >= 384


def wait_until_turned_away(url: str, timeout_s: float = 30.0) -> None:
    """Until a new request at `url` finds nobody listening, or a server that is leaving."""
    body = {"prompt": "hello", "gen_length": 1}
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            response = httpx.post(f"{url}{GENERATE}", json=body, timeout=30, trust_env=False)
        except httpx.TransportError:
            return
        if response.status_code >= 500:
            return
        time.sleep(POLL_S)
    raise AssertionError("new requests are still served")


def test_vllm_serve_has_the_diffusion_routes(servers: dict[str, ServerProcess]) -> None:
    """Upstream's console script becomes ours through PYTHONPATH alone."""
    server = servers["vllm serve"]
    with server.client() as http:
        client = Client(http)
        assert client.ask()["text"] == [ANSWER]
        chat = client.answer(CHAT, body_for(CHAT, gen_length=32, steps=8))
        assert chat["choices"][0]["message"]["content"] == ANSWER
        assert http.post(GENERATE, json={"prompt": "hello", "stepz": 1}).status_code == 400
    assert "Traceback" not in server.log()
    server.terminate()
    assert server.wait() == 0, server.log()
    assert server.group_is_empty()


@pytest.fixture(scope="module")
def failed_starts(
    server: ServerProcess, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Logs of servers that cannot start, side by side; each ended by itself, with a failure."""
    folder = tmp_path_factory.mktemp("failed")
    commands = {
        "port in use": ["--model", str(model_dir), "--port", str(server.port)],
        "no model": ["--model", "/no/such/model", "--port", str(free_port())],
        "unknown setting": [
            *("--model", str(model_dir), "--port", str(free_port())),
            *("--additional-config", '{"dllm": {"stepz": 8}}'),
        ],
    }
    started = {
        name: ServerProcess([*SERVER, *arguments], folder / f"{name}.log", port=server.port)
        for name, arguments in commands.items()
    }
    try:
        for name, process in started.items():
            assert process.wait(START_S) > 0, f"{name}:\n{process.log()}"
            assert process.group_is_empty(), name
    finally:
        for process in started.values():
            process.kill()
    return {name: process.log() for name, process in started.items()}


def test_a_port_in_use(failed_starts: dict[str, str], client: Client) -> None:
    assert "Address already in use" in failed_starts["port in use"]
    assert client.ask()["text"] == [ANSWER]  # the older server is not disturbed


def test_a_missing_model_directory(failed_starts: dict[str, str]) -> None:
    assert "/no/such/model" in failed_starts["no model"]


def test_a_setting_that_does_not_exist(failed_starts: dict[str, str]) -> None:
    assert "stepz: given 8; unknown parameter" in failed_starts["unknown setting"]


def test_the_script_names_the_variables_of_a_missing_model(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(LLADA_SCRIPT)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(MODEL_DIR=str(tmp_path / "none")),
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "MODEL_DIR" in done.stderr
    assert "MOSAIC_MODEL_ROOT" in done.stderr

# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping: the ways to start a server, SIGTERM, and starts that must fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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

STEP_LINE = r"execute_diffusion_once time = [\d.]+ ms"


@pytest.fixture
def scripted_server(model_dir: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of scripts/run_llada_server.sh, which a test may stop."""
    port = free_port()
    process = ServerProcess(
        ["bash", str(ROOT / "scripts" / "run_llada_server.sh")],
        tmp_path / "server.log",
        port=port,
        LLADA_MODEL_DIR=str(model_dir),
        PORT=str(port),
        MAX_MODEL_LEN="8192",  # longer than config.json says: the script allows it
        EXTRA_VLLM_ARGS="--served-model-name 'two words'",
        VLLM_LOG_DIFFUSION_STEPS="1",
    )
    try:
        process.wait_until_healthy()
        yield process
    finally:
        process.kill()


def test_sigterm_lets_requests_finish(scripted_server: ServerProcess) -> None:
    """Plain and streamed requests finish, newcomers are turned away, the exit status is 0."""
    long: dict[str, Any] = {"gen_length": 384, "steps": 384, "ignore_eos": True, "seed": 1}
    body = {"prompt": PUZZLE, **long}
    with scripted_server.client() as http, ThreadPoolExecutor(2) as pool:
        client = Client(http)
        assert client.http.get("/v1/models").json()["data"][0]["id"] == "two words"
        assert client.ask()["text"] == [ANSWER]
        plain = pool.submit(client.generate, **body)
        streamed = pool.submit(client.events, GENERATE, body)
        client.wait_for_num_requests(2)
        scripted_server.terminate()
        wait_until_refused(scripted_server.url)
        assert not plain.done()
        answer = plain.result()
        assert len(answer["token_ids"][0]) == 384
        assert answer["finish_reason"] == ["length"]
        assert streamed.result()[-1]["token_ids"] == answer["token_ids"]
    assert scripted_server.wait() == 0, scripted_server.log()
    assert scripted_server.group_is_empty()
    assert "Traceback" not in scripted_server.log()
    assert len(re.findall(STEP_LINE, scripted_server.log())) >= 384


def wait_until_refused(url: str, timeout_s: float = 30.0) -> None:
    """Until nobody takes new connections at `url`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health", timeout=10, trust_env=False)
        except httpx.TransportError:
            return
        time.sleep(POLL_S)
    raise AssertionError("new connections are still taken")


def test_vllm_serve_has_the_diffusion_routes(model_dir: Path, tmp_path: Path) -> None:
    """Upstream's console script becomes ours through PYTHONPATH alone."""
    script = shutil.which("vllm", path=environment()["PATH"])
    assert script, "the installed upstream package brings `vllm`"
    process = ServerProcess(
        [script, "serve", str(model_dir), "--served-model-name", MODEL_NAME],
        tmp_path / "server.log",
    )
    try:
        process.wait_until_healthy()
        with process.client() as http:
            client = Client(http)
            assert client.ask()["text"] == [ANSWER]
            chat = client.answer(CHAT, body_for(CHAT, gen_length=32, steps=8))
            assert chat["choices"][0]["message"]["content"] == ANSWER
            assert http.post(GENERATE, json={"prompt": "hello", "stepz": 1}).status_code == 400
        process.terminate()
        assert process.wait() == 0, process.log()
        assert process.group_is_empty()
        assert "Traceback" not in process.log()
    finally:
        process.kill()


def start_in_vain(tmp_path: Path, *arguments: str) -> str:
    """Run the server, which must end by itself with a failure; returns its log."""
    log = tmp_path / "server.log"
    process = ServerProcess([*SERVER, *arguments], log)
    try:
        assert process.wait(START_S) not in (0, -9, -15)
        assert process.group_is_empty()
    finally:
        process.kill()
    return process.log()


def test_a_port_in_use(server: ServerProcess, model_dir: Path, tmp_path: Path) -> None:
    process = ServerProcess(
        [*SERVER, "--model", str(model_dir), "--port", str(server.port)],
        tmp_path / "server.log",
        port=server.port,
    )
    try:
        assert process.wait(START_S) != 0
        assert "Address already in use" in process.log()
        assert process.group_is_empty()
    finally:
        process.kill()
    with server.client() as http:  # the older server is not disturbed
        assert Client(http).ask()["text"] == [ANSWER]


def test_a_missing_model_directory(tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    assert str(missing) in start_in_vain(tmp_path, "--model", str(missing))


def test_settings_that_do_not_exist(model_dir: Path, tmp_path: Path) -> None:
    log = start_in_vain(
        tmp_path, "--model", str(model_dir), "--additional-config", '{"dllm": {"stepz": 8}}'
    )
    assert "stepz: given 8; unknown parameter" in log


def test_the_script_names_the_variables_of_a_missing_model(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "run_llada_server.sh")],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(MODEL_DIR=str(tmp_path / "none")),
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "MODEL_DIR" in done.stderr
    assert "MOSAIC_MODEL_ROOT" in done.stderr


def test_help(tmp_path: Path) -> None:
    done = subprocess.run(
        [*SERVER, "--help"],
        capture_output=True,
        text=True,
        timeout=START_S,
        env=environment(),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "python -m vllm.entrypoints.api_server" in done.stdout


def test_python_is_the_interpreter_of_the_tests() -> None:
    """The scripts above find the same Python as these tests."""
    found = shutil.which("python", path=environment()["PATH"])
    assert found is not None
    assert Path(found).parent == Path(sys.executable).parent

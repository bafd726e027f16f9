# SPDX-License-Identifier: Apache-2.0
"""Starting and stopping servers: ways to start, SIGTERM, dead engines, and failing starts."""

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.programs import ROOT, output_of, run, wait_for
from tests.server.client import (
    ANSWER,
    CHAT,
    COMPLETIONS,
    GENERATE,
    LONG,
    MESSAGES,
    PUZZLE,
    Client,
    body_for,
    refusal,
)
from tests.server.process import (
    MODEL_NAME,
    PATIENCE_S,
    SERVER,
    START_S,
    ServerProcess,
    environment,
    free_port,
    healthy,
    is_error,
)

SCREEN = 40  # lines
POOL_BYTES = 230_000  # for the server that loses its engine; enough for short answers
STEP_LINE = r"execute_diffusion_once time = [\d.]+ ms"
LLADA_SCRIPT = ROOT / "scripts" / "run_llada_server.sh"
# GPU libraries can install signal handlers after which a blocking wait continues.
SLEEPS_THROUGH_SIGNALS = """
import signal, threading, time
def go_on():
    while True:
        signal.siginterrupt(signal.SIGTERM, False)
        time.sleep(0.02)
threading.Thread(target=go_on, daemon=True).start()
"""


@pytest.fixture(scope="module")
def servers(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ServerProcess]]:
    """Start servers that a test may stop, in the other two ways and at once, to save time."""
    folder = tmp_path_factory.mktemp("lifecycle")
    upstream = shutil.which("vllm", path=environment()["PATH"])
    assert upstream, "the installed upstream package brings `vllm`"
    port = free_port()
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(SLEEPS_THROUGH_SIGNALS)
    actual = {
        "script": ServerProcess(
            ["env", "-u", "VLLM_WORKER_MULTIPROC_METHOD", "bash", str(LLADA_SCRIPT)],
            folder / "script.log",
            port=port,
            PYTHONPATH=str(folder / "path"),
            LLADA_MODEL_DIR=str(model_dir),
            PORT=str(port),
            MAX_MODEL_LEN="8192",  # longer than in config.json; the script allows it
            EXTRA_VLLM_ARGS="--served-model-name 'two words' --shutdown-timeout 120",
            VLLM_LOG_DIFFUSION_STEPS="1",
            VLLM_PLUGINS="foreign",  # our plugins are added
        ),
        "vllm serve": ServerProcess(
            [
                *(sys.executable, upstream, "serve", str(model_dir)),
                *("--served-model-name", MODEL_NAME, "--shutdown-timeout", "1", "--no-page"),
            ],
            folder / "serve.log",
            VLLM_API_KEY="secret",
            DLLM_MAX_REQUEST_BYTES="10000",
        ),
        "to be killed": ServerProcess(
            [*SERVER, str(model_dir), "--served-model-name", MODEL_NAME, "--dtype", "float32"],
            folder / "killed.log",
            VLLM_ACTIVATION_POOL_SIZE_BYTES=str(POOL_BYTES),
            VLLM_SERVER_DEV_MODE="1",  # enables the routes that pause
            DLLM_MAX_SILENCE_S="2",
            DLLM_RECEIVE_TIMEOUT_S="2",
        ),
    }
    with healthy(*actual.values()):
        yield actual


def test_the_log_of_a_start_fits_on_a_screen(server: ServerProcess) -> None:
    """The log names the hardware, and each argument without effect once."""
    text, _, _ = server.log().partition("Application startup complete")
    assert len(text.splitlines()) <= SCREEN, text
    assert re.match(r".*\] Mosaic \d+\.\d+\.\d+ on vLLM 0\.33\.0, model ", text.splitlines()[0])
    for line in ("flash_sample: ", "fused_ops: ", "gather_gemm: ", "vmm_allocator: "):
        assert text.count(line) == 1, text
    for line in ("activation pool: ", "attention: ", "CUDA graphs: "):
        assert text.count(f"] {line}") == 1, text
    (command,) = re.findall(r"\] or run: (curl .*)$", text, re.MULTILINE)
    output = output_of("bash", "-c", f"NO_PROXY=127.0.0.1 {command}")
    assert json.loads(output)["text"] == [ANSWER]
    assert "(llada): prompt and canvas up to 4096 tokens" in text
    named = "without effect on a diffusion language model: --enable-prefix-caching"
    assert text.count(named) == 1
    for other in ("Route: ", "Initializing a V1 LLM engine", "You are using a model of type"):
        assert other not in text


def test_sigterm_lets_requests_finish(servers: dict[str, ServerProcess]) -> None:
    """Running requests finish, new ones are refused, and the exit status is 0.

    The engine is suspended until all of that has been checked, and it ignores its own signal.
    """
    server = servers["script"]
    body: dict[str, Any] = {"prompt": PUZZLE, "gen_length": 64, "steps": 64, "ignore_eos": True}
    for line in ("without effect", "lead to nan", "generation flags are not valid"):
        assert line not in server.log()
    assert "tokens (config.json has 4096)" in server.log()
    with server.client() as http, ThreadPoolExecutor(2) as pool:
        client = Client(http)
        assert client.http.get("/v1/models").json()["data"][0]["id"] == "two words"
        assert client.ask()["text"] == [ANSWER]
        assert client.http.get("/ready").status_code == 200
        engine = server.engine()
        assert engine.create_time() < first_word(server.log())
        engine.suspend()
        plain = pool.submit(client.generate, **body)
        streamed = pool.submit(client.events, GENERATE, body)
        wait_for_requests(http, 2)
        server.terminate()
        wait_until_turned_away(server)
        assert client.http.get("/health").status_code == 200  # alive and busy
        assert client.http.get("/ready").json() == {"status": "draining"}
        assert not plain.done()
        engine.resume()
        answer = plain.result()
        assert len(answer["token_ids"][0]) == 64
        assert answer["finish_reason"] == ["length"]
        assert streamed.result()[-1]["token_ids"] == answer["token_ids"]
    assert server.wait() == 0, server.log()
    assert server.group_is_empty()
    assert len(re.findall(STEP_LINE, server.log())) >= 64
    assert "force killing" not in server.log()
    assert "Traceback" not in server.log()


def first_word(log: str) -> float:
    """Return the time of the server's first log line, which follows all imports."""
    match = re.search(r"^\(APIServer pid=\d+\) \w+ (\d\d-\d\d [\d:]{8})", log, re.MULTILINE)
    assert match, log
    year = time.localtime().tm_year
    return time.mktime(time.strptime(f"{year}-{match[1]}", "%Y-%m-%d %H:%M:%S"))


def wait_for_requests(http: httpx.Client, wanted: int) -> None:
    """Wait until the server waits for `wanted` answers of a suspended engine."""
    wait_for(lambda: len(http.get("/status.json").json()["requests"]) == wanted)


def wait_until_turned_away(server: ServerProcess) -> None:
    """Wait until a new request is refused because of the shutdown; the engine is suspended."""
    with server.client() as http:
        wait_for(lambda: http.get("/ready").json() == {"status": "draining"})
        response = http.post(GENERATE, json={"prompt": "hello", "gen_length": 1})
    assert "shutting down" in refusal(response, 503)["message"]
    assert response.headers["retry-after"]


def test_an_engine_that_stands_still(servers: dict[str, ServerProcess]) -> None:
    """Timeouts end requests of a suspended engine, and `/ready` reports that it does not answer."""
    server = servers["to be killed"]
    with server.client() as http, ThreadPoolExecutor(1) as pool:
        client, engine = Client(http), server.engine()
        engine.suspend()
        try:
            timed = pool.submit(http.post, GENERATE, json={"prompt": PUZZLE, "timeout_s": 0.5})
            wait_for(lambda: http.get("/ready").status_code == 503)
            content = http.get("/ready").json()
            assert content["status"] == "unresponsive"
            assert content["engine_silent_s"] > 2
            assert http.get("/health").status_code == 200
            assert "the engine has not answered" in refusal(timed.result(), 504)["message"]
        finally:
            engine.resume()
        wait_for(lambda: http.get("/ready").json() == {"status": "ready"})
        assert client.ask()["text"] == [ANSWER]
        client.wait_for_num_requests(0)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTT",
        b"GET /health HTTP/1.1\r\nHost: here\r\n",
        b"POST /generate HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half a line", "half a head", "half a body"],
)
def test_half_a_request_is_not_waited_for(servers: dict[str, ServerProcess], sent: bytes) -> None:
    server = servers["to be killed"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    with server.client() as http:
        assert Client(http).ask()["text"] == [ANSWER]


def test_a_head_that_is_too_large(servers: dict[str, ServerProcess]) -> None:
    server = servers["to be killed"]
    with server.client() as http:
        for headers in ({"X-Long": "x" * (5 << 20)}, {f"X-{i}": "x" for i in range(300)}):
            assert http.get("/health", headers=headers).status_code == 431
        assert http.get("/health").status_code == 200


def test_vllm_serve_has_the_diffusion_routes(servers: dict[str, ServerProcess]) -> None:
    """PYTHONPATH alone makes upstream's console script start our server."""
    server = servers["vllm serve"]
    with server.client() as http:
        for route in (GENERATE, "/invocations"):
            assert "API key" in refusal(http.post(route, json={}), 401)["message"]
        assert http.post(CHAT, json={}).status_code == 401
        http.headers["Authorization"] = "Bearer secret"
        # The server has --no-page.
        assert http.get("/").status_code == http.get("/status").status_code == 404
        client = Client(http)
        assert client.ask()["text"] == [ANSWER]
        chat = client.answer(CHAT, body_for(CHAT, gen_length=32, steps=8))
        assert chat["choices"][0]["message"]["content"] == ANSWER
        assert http.post(GENERATE, json={"prompt": "hello", "stepz": 1}).status_code == 400
        too_large = http.post(CHAT, json=body_for(CHAT) | {"padding": "x" * 10000})
        assert "at most 10000 bytes" in refusal(too_large, 413)["message"]
        named = http.post(CHAT, json=body_for(CHAT), headers={"X-Request-Id": "mine-7"})
        assert named.headers["X-Request-Id"] == "mine-7"
        assert named.json()["id"] == "chatcmpl-mine-7"
    server.wait_for_line(rf'"POST {CHAT}" 200 [\d.]+ s id=mine-7')


def test_vllm_serve_ends_well(servers: dict[str, ServerProcess]) -> None:
    """Interrupted streams end with an error event, and leave one line in the log."""
    server = servers["vllm serve"]
    routes = (GENERATE, CHAT, COMPLETIONS, MESSAGES)
    with server.client() as http, ThreadPoolExecutor(len(routes)) as pool:
        http.headers["Authorization"] = "Bearer secret"
        assert (
            "nobody"
            in refusal(http.post(CHAT, json=body_for(CHAT, model="nobody")), 404)["message"]
        )

        def stream(route: str) -> str:
            fields = {k: v for k, v in LONG.items() if k != "prompt"}
            return http.post(route, json=body_for(route, **fields, stream=True)).text

        streams = [pool.submit(stream, route) for route in routes]
        Client(http).wait_for_num_requests(len(routes))
        server.terminate()
        for actual in streams:
            assert "the server is shutting down" in actual.result()
        kind = json.loads(streams[-1].result().strip().rpartition("data: ")[2])["error"]["type"]
        assert kind == "overloaded_error"
    assert server.wait() == 0, server.log()
    assert f"{len(routes)} requests are aborted" in server.log()
    for word in ("Traceback", "ERROR"):
        assert word not in server.log()
    assert server.group_is_empty()


@pytest.fixture
def doomed(servers: dict[str, ServerProcess]) -> Iterator[httpx.Client]:
    """Yield a client of the server with a small pool, whose engine is killed in the end."""
    with servers["to be killed"].client() as http:
        yield http


def test_requests_that_never_fit_are_refused_on_every_route(doomed: httpx.Client) -> None:
    prompt, model = [5] * 44, MODEL_NAME
    bodies = {
        GENERATE: {"prompt": prompt, "gen_length": 256},
        COMPLETIONS: {"prompt": prompt, "gen_length": 256, "model": model},
    }
    for route, body in bodies.items():
        message = refusal(doomed.post(route, json=body))["message"]
        assert message.startswith("prompt + gen_length: given 300; its steps need ")
        assert "tokens" in message
        longest = int(message.split("wanted at most ")[1].split()[0])
        assert 44 + 16 <= longest < 300


def test_an_answer_says_what_its_largest_step_took(doomed: httpx.Client) -> None:
    answer = doomed.post(GENERATE, json={"prompt": [5] * 20, "gen_length": 16}).json()
    report = answer["diffusion"]
    assert 0 < report["average_bytes"] <= report["peak_bytes"] <= report["budget_bytes"]
    assert report["budget_bytes"] < POOL_BYTES


def test_a_paused_engine_is_not_ready(doomed: httpx.Client) -> None:
    """`/ready` waits a little for the engine, and otherwise returns its previous state."""

    def is_reported(state: str) -> bool:
        response = doomed.get("/ready")
        message = response.json() == {"status": state}
        assert not message or response.status_code == (200 if state == "ready" else 503)
        return message

    wait_for(lambda: is_reported("ready"))
    assert doomed.post("/pause", params={"mode": "keep"}).status_code == 200
    wait_for(lambda: is_reported("paused"))
    assert doomed.get("/health").status_code == 200
    assert doomed.post("/resume").status_code == 200
    wait_for(lambda: is_reported("ready"))
    assert Client(doomed).ask()["text"] == [ANSWER]


def test_a_dead_engine_ends_everything(
    servers: dict[str, ServerProcess], doomed: httpx.Client
) -> None:
    """After the engine was killed, no route reports health and no request hangs.

    The engine is suspended before, so that its requests are incomplete.
    """
    server, body = servers["to be killed"], {"prompt": PUZZLE, "gen_length": 16}
    engine = server.engine()
    engine.suspend()
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(doomed.post, GENERATE, json=body)
        streamed = pool.submit(last_event, doomed, body)
        wait_for_requests(doomed, 2)
        engine.kill()
        server.wait_until_unhealthy()
        assert is_error(plain)
        assert is_error(streamed)
    assert server.wait() is not None
    assert server.group_is_empty()


def last_event(http: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    """Return a response with the last event of a stream before its end mark."""
    with http.stream("POST", GENERATE, json={**body, "stream": True}) as response:
        actual = [line for line in response.iter_lines() if line and "[DONE]" not in line]
    text = actual[-1].removeprefix("data: ") if actual else "{}"
    return httpx.Response(500 if "error" in text else 200, text=text)


@pytest.fixture(scope="module")
def failed_starts(
    server: ServerProcess, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Return the logs of servers that cannot start at once; each must end with a failure status."""
    folder = tmp_path_factory.mktemp("failed")
    commands = {
        "port in use": ["--model", str(model_dir), "--port", str(server.port)],
        "no model": ["--model", "/no/such/model", "--port", str(free_port())],
        "unknown setting": [
            *("--model", str(model_dir), "--port", str(free_port())),
            *("--additional-config", '{"dllm": {"stepz": 8}}'),
        ],
        "no key": [
            *("--model", str(model_dir), "--port", str(free_port())),
            *("--ssl-keyfile", "/no/key.pem", "--ssl-certfile", "/no/certificate.pem"),
        ],
        "no certificate": [
            *("--model", str(model_dir), "--port", str(free_port())),
            *("--ssl-keyfile", "/no/key.pem"),
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("port in use", r"port \d+ of 127\.0\.0\.1 is in use; --port takes another$"),
        ("no model", "model /no/such/model: no such folder"),
        ("unknown setting", ".*stepz: given 8; unknown parameter"),
        ("no key", "--ssl-keyfile /no/key.pem, --ssl-certfile /no/certificate.pem: "),
        ("no certificate", "--ssl-certfile: given none; wanted a file with --ssl-keyfile$"),
    ],
)
def test_a_start_that_fails_ends_with_one_line(
    name: str, message: str, failed_starts: dict[str, str], client: Client
) -> None:
    log = failed_starts[name]
    assert re.match(f"error: {message}", log.splitlines()[-1]), log
    assert "Traceback" not in log
    # Without a key or a certificate, the server ends before it loads a model.
    assert "EngineCore" not in log or name not in ("no key", "no certificate")
    if name == "port in use":
        assert f"port {client.http.base_url.port} " in log
        assert client.ask()["text"] == [ANSWER]  # the older server still works


def test_an_engine_that_ends_while_it_starts_takes_the_server_along(
    model_dir: Path, tmp_path: Path
) -> None:
    """A signal may reach the whole process group while upstream waits for the engine."""
    # The server has its own process group, and starts its engine as a user's server does.
    command = ["env", "-u", "VLLM_WORKER_MULTIPROC_METHOD", *SERVER, "--model", str(model_dir)]
    server = ServerProcess(command, tmp_path / "server.log")
    try:
        server.wait_for_line(".*Using max model len.*")
        time.sleep(0.3)
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()  # fails if the server does not end; its status does not matter
    finally:
        server.kill()


def test_an_interrupt_during_imports_ends_both_processes_without_a_traceback(
    model_dir: Path, tmp_path: Path
) -> None:
    """A terminal sends the signal to the server and to the engine's process."""
    command = ["env", "-u", "VLLM_WORKER_MULTIPROC_METHOD", *SERVER, "--model", str(model_dir)]
    server = ServerProcess(command, tmp_path / "server.log")
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    try:
        wait_for(lambda: len(children.read_text().split()) > 1)  # the engine and a tracker
        time.sleep(0.3)
        os.killpg(server.pid, signal.SIGINT)
        assert server.wait() == -signal.SIGINT
        assert server.group_is_empty()
        assert "Traceback" not in server.log()
    finally:
        server.kill()


def test_the_script_names_the_variable_of_a_missing_model(tmp_path: Path) -> None:
    nowhere = tmp_path / "none"
    done = run("bash", LLADA_SCRIPT, env=environment(LLADA_MODEL_DIR=str(nowhere)))
    assert done.returncode == 1
    assert done.stderr == f"error: model {nowhere} (LLADA_MODEL_DIR): no such folder\n"

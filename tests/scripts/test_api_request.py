# SPDX-License-Identifier: Apache-2.0
"""scripts/test_api_request.py with a real HTTP server that records its requests."""

import json
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, add_program, run_python
from tests.stub_server import Stub

SCRIPT = ROOT / "scripts" / "test_api_request.py"
NAMES = runpy.run_path(str(SCRIPT), run_name="api_request")
ANSWER = {"id": "x", "text": ["Paris"], "finish_reason": ["stop"]}


class Server(Stub):
    """Answers every POST with `status` and `answer` after `delay_s`."""

    def __init__(self) -> None:
        super().__init__()
        self.status, self.answer, self.delay_s = 200, json.dumps(ANSWER), 0.0
        self.mask_id: int | None = None  # if set, other mask ids are refused

    def reply(self, _: str, body: Any) -> tuple[int, Any]:
        time.sleep(self.delay_s)
        if self.mask_id is not None and body["mask_id"] != self.mask_id:
            message = f"mask_id: given {body['mask_id']}; wanted the model's: {self.mask_id}"
            return 400, {"error": {"message": message, "param": "mask_id"}}
        return self.status, self.answer


@pytest.fixture
def server() -> Iterator[Server]:
    with Server().serving() as server:
        yield server


@pytest.fixture
def request_once(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Call the script's `main`; another test starts the script as a program."""
    # No process listens at this proxy, because a server on this machine must be reached without it.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)

    def run(*arguments: str, host: str = server.url) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        try:
            status = NAMES["main"](["--host", host, *arguments])
        except SystemExit as exit:
            status = exit.code
        return subprocess.CompletedProcess(arguments, status, *capsys.readouterr())

    return run


def test_an_empty_answer_says_so(server: Server, request_once: Callable[..., Any]) -> None:
    empty = {**ANSWER, "text": [""], "diffusion": {"num_end_tokens": 32}}
    server.answer = json.dumps(empty)
    done = request_once()
    assert (done.returncode, done.stderr) == (0, "note: empty answer: 32 end tokens\n")
    assert json.loads(done.stdout) == empty


def test_sends_the_documented_body(server: Server, request_once: Callable[..., Any]) -> None:
    done = request_once(
        *("--model-family", "llada", "--steps", "8", "--gen-length", "32"),
        *("--block-length", "16", "--prompt", "What is 2 plus 2?"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == ANSWER
    wanted = {"prompt": "What is 2 plus 2?", "apply_chat_template": True, "steps": 8}
    wanted |= {"max_tokens": 32, "gen_length": 32, "output_length": 32, "block_length": 16}
    wanted |= {"temperature": 0.0, "cfg_scale": 0.0, "remasking": "low_confidence"}
    assert server.posted == [("/generate", {**wanted, "mask_id": 126336})]


STANDARD = {
    *("prompt", "max_tokens", "gen_length", "output_length", "steps", "block_length"),
    *("temperature", "cfg_scale", "remasking", "mask_id"),
}


# The port of each family's server, its mask token, and the length of its blocks.
FAMILIES = {
    "llada": (8901, 126336, 32),
    "dream": (8701, 151666, 32),
    "llada-moe": (10001, 156895, 32),
    "llada2": (8902, 156895, 32),
    "sdar": (8903, 151669, 4),
    "fast-dllm": (8904, 151665, 32),
    "llada22": (8905, 156895, 32),
    "nemotron": (8906, 100, 32),
    "stable-diffcoder": (8907, 5, 4),
    "a2d": (8909, 151669, 32),
    "idlm": (8920, 151669, 32),
    "diffusion-gemma": (8908, None, 256),
}
OF_MASKS = {"mask_id", "remasking"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_the_standard_fields(
    server: Server, request_once: Callable[..., Any], family: str
) -> None:
    _, mask_id, block_length = FAMILIES[family]
    own = {"algorithm": "dream", "alg": "entropy"} if family == "dream" else {}
    assert request_once("--model-family", family, "--gen-length", "64").returncode == 0
    ((path, body),) = server.posted
    assert path == "/generate"
    left_out = OF_MASKS if mask_id is None else set()
    assert body.keys() == (STANDARD | {"apply_chat_template"} | own.keys()) - left_out
    assert body.get("mask_id") == mask_id
    assert (body["steps"], body["block_length"]) == (32, block_length)
    assert {body[name] for name in ("max_tokens", "gen_length", "output_length")} == {64}
    assert {name: body[name] for name in own} == own


@pytest.mark.parametrize("family", FAMILIES)
def test_default_address_is_that_of_the_server_script(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = FAMILIES[family][0]
    script = (SCRIPT.parent / f"run_{family.replace('-', '_')}_server.sh").read_text()
    assert f" {port} " in script.splitlines()[-1]
    answer = '{"text": ["%s"]}'
    monkeypatch.setitem(NAMES["main"].__globals__, "post", lambda url, *_: answer % url)
    assert NAMES["main"](["--model-family", family]) == 0
    assert capsys.readouterr().out == answer % f"http://127.0.0.1:{port}/generate" + "\n"


@pytest.mark.parametrize(("given", "sent"), [("none", None), ("7", 7), ("family", 126336)])
def test_mask_id(
    server: Server, request_once: Callable[..., Any], given: str, sent: int | None
) -> None:
    assert request_once("--mask-id", given).returncode == 0
    assert server.posted[0][1].get("mask_id") == sent


def test_raw_sends_no_chat_template(server: Server, request_once: Callable[..., Any]) -> None:
    assert request_once("--raw", "--prompt", "<s>x").returncode == 0
    assert server.posted[0][1]["prompt"] == "<s>x"
    assert "apply_chat_template" not in server.posted[0][1]


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the only line of stderr of a request without an answer."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    return done.stderr


def test_absent_server_is_one_line(request_once: Callable[..., Any]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = request_once(host=f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert error_of(done).startswith("error: no server answers at http://127.0.0.1:")


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        (
            '{"error": {"message": "mask_id: given 126336; allowed 511", "param": "mask_id"}}',
            "refused the request (400): mask_id: given 126336; allowed 511",
        ),
        ('{"error": {"message": "too long", "param": "prompt"}}', "(400): prompt: too long"),
        ("<html>\n bad\n</html>", "(400): <html> bad </html>"),
        ("", "(400): no message"),
    ],
)
def test_refusal_is_one_line(
    server: Server, request_once: Callable[..., Any], answer: str, wanted: str
) -> None:
    server.status, server.answer = 400, answer
    assert wanted in error_of(request_once())


def test_timeout_is_one_line(server: Server, request_once: Callable[..., Any]) -> None:
    server.delay_s = 30.0
    assert "did not answer within 0.2 s" in error_of(request_once("--timeout", "0.2"))


def test_another_checkpoints_mask_id_is_taken_from_its_refusal(
    server: Server, request_once: Callable[..., Any]
) -> None:
    server.mask_id = 511
    done = request_once()
    assert (done.returncode, json.loads(done.stdout)) == (0, ANSWER)
    assert done.stderr == "note: the mask token of this server's checkpoint is 511\n"
    assert [body["mask_id"] for _, body in server.posted] == [126336, 511]
    error = error_of(request_once("--mask-id", "126336"))  # a given id is not replaced
    assert "mask_id: given 126336; wanted the model's: 511" in error
    assert len(server.posted) == 3


def test_a_connection_that_breaks_off_is_one_line(request_once: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        done = request_once(host=f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert "broke off the connection" in error_of(done)


def test_a_python_without_requests(server: Server, tmp_path: Path) -> None:
    """The script starts with the Python of the set-up, or names the missing package in one line."""
    script = tmp_path / "scripts" / SCRIPT.name
    script.parent.mkdir()
    script.write_text(SCRIPT.read_text())
    command = ("-S", script, "--host", server.url)  # -S: no packages
    done = run_python(*command)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: no module named requests; scripts/setup.sh installs it\n"
    python = tmp_path / ".venv" / "bin" / "python"
    add_program(python, f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ANSWER


@pytest.mark.parametrize("arguments", [("--model-family", "gpt"), ("--mask-id", "x")])
def test_wrong_arguments_exit_2(request_once: Callable[..., Any], arguments: tuple[str]) -> None:
    assert request_once(*arguments).returncode == 2
    assert request_once(host="127.0.0.1:8901").returncode == 2

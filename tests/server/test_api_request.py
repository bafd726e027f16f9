# SPDX-License-Identifier: Apache-2.0
"""scripts/test_api_request.py against the real server (its own tests use a recording one)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.server.client import ANSWER, QUESTION
from tests.server.process import ROOT, environment, free_port

if TYPE_CHECKING:
    from tests.server.client import Client
    from tests.server.process import ServerProcess

SCRIPT = ROOT / "scripts" / "test_api_request.py"
USUAL = ("--model-family", "llada", "--steps", "8", "--gen-length", "32", "--block-length", "32")


def request_once(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--host", url, *USUAL, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )


def test_prints_the_raw_answer(client: Client, server: ServerProcess) -> None:
    done = request_once(server.url, "--mask-id", "none")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["text"] == [ANSWER]
    assert answer["diffusion"]["num_forwards"] == 8
    assert answer["usage"] == client.ask(gen_length=32, steps=8)["usage"]


def test_raw_prompt(client: Client, server: ServerProcess) -> None:
    done = request_once(server.url, "--mask-id", "none", "--raw", "--prompt", QUESTION)
    assert done.returncode == 0, done.stderr
    raw = client.generate(prompt=QUESTION, gen_length=32, steps=8)
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == raw["token_ids"]
    assert answer["usage"] == raw["usage"]


def test_a_refusal_is_one_line(client: Client, server: ServerProcess) -> None:
    """A mask id that is given is meant, though it is not this checkpoint's."""
    done = request_once(server.url, "--mask-id", "126336")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "(400)" in done.stderr
    assert "mask_id: given 126336; wanted the model's: " in done.stderr


def test_an_absent_server_is_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = request_once(url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert url in done.stderr

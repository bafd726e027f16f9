# SPDX-License-Identifier: Apache-2.0
"""scripts/test_api_request.py against the real server (its own tests use a recording one)."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.server.client import ANSWER
from tests.server.process import ROOT, environment

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

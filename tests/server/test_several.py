# SPDX-License-Identifier: Apache-2.0
"""Servers of several ranks or replicas: what is told of them, and what comes of one that dies."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.server.client import PUZZLE
from tests.server.process import SERVER, ServerProcess
from tests.server.test_watchdog import descendants, still_alive

if TYPE_CHECKING:
    from pathlib import Path

    import psutil

HEARD_S = 5.0
LONG = {"prompt": PUZZLE, "gen_length": 2048, "steps": 2048, "block_length": 2048}


def named(processes: list[psutil.Process], title: str) -> list[psutil.Process]:
    return [process for process in processes if title in "".join(process.cmdline())]


def seconds_until_unhealthy(server: ServerProcess) -> float:
    """How long until /health says 503; a server that has ended by itself says it no more."""
    started, told = time.monotonic(), False
    with server.client(2.0) as client:
        while not told and time.monotonic() < started + 4 * HEARD_S:
            try:
                told = client.get("/health").status_code == 503
            except httpx.TransportError:
                break
            time.sleep(0.02)
    return time.monotonic() - started if told else float("inf")


@pytest.mark.slow
def test_a_killed_rank_is_told_and_leaves_nothing_behind(model_dir: Path, tmp_path: Path) -> None:
    """The other rank waits for it in the middle of a step."""
    command = [*SERVER, "--model", str(model_dir), "--max-model-len", "4096"]
    server = ServerProcess([*command, "--tensor-parallel-size", "2"], tmp_path / "server.log")
    try:
        server.wait_until_healthy()
        with pytest.raises(httpx.TransportError), server.client(1.0) as client:
            client.post("/generate", json={**LONG, "ignore_eos": True})
        started = descendants(server.pid)
        rank = named(started, "Worker_TP1")[0]
        rank.kill()
        assert seconds_until_unhealthy(server) < HEARD_S
        assert still_alive(started) == []
    finally:
        server.kill()

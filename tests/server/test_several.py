# SPDX-License-Identifier: Apache-2.0
"""Servers of several ranks or replicas: what is told of them, and what comes of one that dies."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
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


def of_engines(text: str, name: str) -> dict[str, float]:
    """A metric of every engine, by its number."""
    pattern = rf'^{re.escape(name)}{{[^}}]*engine="(\d+)"[^}}]*}} (\S+)$'
    return {engine: float(value) for engine, value in re.findall(pattern, text, re.MULTILINE)}


def seconds_until_unhealthy(server: ServerProcess) -> float:
    """How long until /health says 503, or until the server has ended by itself."""
    started, told = time.monotonic(), False
    with server.client(2.0) as client:
        while not told and time.monotonic() < started + 4 * HEARD_S:
            try:
                told = client.get("/health").status_code == 503
            except httpx.TransportError:  # it closes its port a moment before it has ended
                told = server.has_ended()
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


@pytest.mark.slow
def test_replicas_share_requests_and_end_together(model_dir: Path, tmp_path: Path) -> None:
    """Statistics are of each replica; upstream's server ends when one of them does."""
    command = [*SERVER, "--model", str(model_dir), "--data-parallel-size", "2"]
    server = ServerProcess(command, tmp_path / "server.log")
    try:
        server.wait_until_healthy()
        assert server.client().get("/ready").json() == {"status": "ready"}
        body = {"prompt": PUZZLE, "gen_length": 32, "steps": 32, "ignore_eos": True}
        with ThreadPoolExecutor(4) as pool, server.client() as client:
            asked = [pool.submit(client.post, "/generate", json=body) for _ in range(4)]
            texts = {future.result().json()["text"][0] for future in asked}
            assert len(texts) == 1
            committed = of_engines(client.get("/metrics").text, "dllm:committed_tokens_total")
        assert sorted(committed) == ["0", "1"]
        assert sum(committed.values()) == 4 * 32
        assert min(committed.values()) > 0
        started = descendants(server.pid)
        named(started, "EngineCore")[0].kill()
        assert seconds_until_unhealthy(server) < HEARD_S
        assert still_alive(started) == []
    finally:
        server.kill()

# SPDX-License-Identifier: Apache-2.0
"""Servers with several ranks or replicas: their statistics, and the death of one process."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil

from tests.server.client import GENERATE, LONG, PUZZLE, Client, refusal
from tests.server.process import (
    PATIENCE_S,
    SERVER,
    ServerProcess,
    healthy,
    is_error,
    named,
    still_alive,
)


def of_engines(text: str, name: str) -> dict[str, float]:
    """Return a metric of every engine, by the engine's number."""
    pattern = rf'^{re.escape(name)}{{[^}}]*engine="(\d+)"[^}}]*}} (\S+)$'
    return {engine: float(value) for engine, value in re.findall(pattern, text, re.MULTILINE)}


def check_memory(server: ServerProcess, http: httpx.Client, share: int) -> None:
    """Compare the pool and the host memory of a rank with its share of the machine's memory."""
    total = psutil.virtual_memory().total / share
    assert http.get("/status.json").json()["pool_bytes"]["budget"] < total
    given = re.findall(r"([\d.]+) GiB of host memory", server.log())
    assert given and all(float(size) < total / 2**30 / 2 + 0.01 for size in given)


def test_a_killed_rank_is_told_and_leaves_nothing_behind(model_dir: Path, tmp_path: Path) -> None:
    """The other rank waits for the killed one in the middle of a step."""
    command = [*SERVER, "--model", str(model_dir), "--tensor-parallel-size", "2"]
    server = ServerProcess(command, tmp_path / "server.log")
    with healthy(server):
        started = server.descendants()
        with server.client() as http, ThreadPoolExecutor(1) as pool:
            check_memory(server, http, share=2)
            answer = pool.submit(http.post, GENERATE, json=LONG)
            Client(http).wait_for_num_requests(1)
            named(started, "Worker_TP1")[0].kill()
            server.wait_until_unhealthy()
            assert is_error(answer)
        assert still_alive(started) == []


def test_replicas_share_requests_and_end_together(model_dir: Path, tmp_path: Path) -> None:
    """Each replica has statistics. If one dies, the server ends and names it."""
    command = [*SERVER, "--model", str(model_dir), "--data-parallel-size", "2"]
    server = ServerProcess(command, tmp_path / "server.log", VLLM_SERVER_DEV_MODE="1")
    with healthy(server):
        bodies = [{"prompt": PUZZLE, "gen_length": 32, "steps": 32, "ignore_eos": True}] * 4
        texts: list[str] = []
        deadline = time.monotonic() + PATIENCE_S
        with ThreadPoolExecutor(4) as pool, server.client() as http:
            assert http.get("/ready").json() == {"status": "ready"}
            assert http.get("/get_world_size").json() == {"world_size": 2}
            check_memory(server, http, share=2)
            actual = http.post("/weight_checker", json={"action": "checksum"}).json()["checksums"]
            assert len({digest for name, digest in actual.items() if "lm_head" in name}) == 1
            assert {name.split(":")[0] for name in actual} == {"dp0", "dp1"}
            committed = {"0": 0.0}
            while min(committed.values()) == 0:  # one request may end before the next one arrives
                assert time.monotonic() < deadline, committed
                answers = pool.map(lambda body: http.post(GENERATE, json=body).json(), bodies)
                texts += [answer["text"][0] for answer in answers]
                committed = of_engines(http.get("/metrics").text, "dllm:committed_tokens_total")
        assert len(set(texts)) == 1
        assert sorted(committed) == ["0", "1"]
        assert sum(committed.values()) == len(texts) * 32
        started = server.descendants()
        with ThreadPoolExecutor(2) as pool, server.client() as http:
            answers = pool.map(lambda body: http.post(GENERATE, json=body), [LONG] * 2)
            Client(http).wait_for_num_requests(2)
            named(started, "EngineCore")[0].kill()
            for answer in answers:  # from the killed replica and from the other one
                assert "an engine of the server is gone" in refusal(answer, 503)["message"]
        assert server.wait() == 1
        assert still_alive(started) == []
    assert (
        len(re.findall(r"EngineCore\S* \(process \d+\) has ended: the server", server.log())) == 1
    )
    assert "Traceback" not in server.log()

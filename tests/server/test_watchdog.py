# SPDX-License-Identifier: Apache-2.0
"""Nothing that a server or an offline program started outlives it, even after SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from tests.server.client import PUZZLE
from tests.server.process import SERVER, START_S, ServerProcess, environment
from tests.server.warm import POLL_S, WarmProcess
from vllm.diffusion import watchdog

if TYPE_CHECKING:
    from pathlib import Path

END_S = 5.0

OFFLINE = """
import sys, time
from vllm import LLM

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], tensor_parallel_size=2, max_model_len=64)
    print("READY", flush=True)
    time.sleep(600)
"""


def descendants(pid: int) -> list[psutil.Process]:
    """The living processes below a process, and what they are."""
    return psutil.Process(pid).children(recursive=True)


def still_alive(processes: list[psutil.Process]) -> list[str]:
    """Those that are there after the time that they have."""
    _, alive = psutil.wait_procs(processes, END_S)
    lines = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                lines.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
    return lines


def test_an_engine_ends_with_its_server(model_dir: Path, tmp_path: Path) -> None:
    """While it computes a request that would take minutes."""
    command = [*SERVER, "--model", str(model_dir), "--max-model-len", "4096"]
    server = ServerProcess(command, tmp_path / "server.log", VLLM_LOG_DIFFUSION_STEPS="1")
    try:
        server.wait_until_healthy()
        body = {"prompt": PUZZLE, "gen_length": 2048, "steps": 2048, "block_length": 2048}
        with contextlib.suppress(httpx.TimeoutException), server.client(1.0) as client:
            client.post("/generate", json={**body, "stream": True, "ignore_eos": True})
        started = descendants(server.pid)
        assert any("EngineCore" in "".join(process.cmdline()) for process in started)
        os.kill(server.pid, signal.SIGKILL)
        assert still_alive(started) == []
    finally:
        server.kill()


@pytest.mark.slow
def test_an_engine_and_its_workers_end_with_an_offline_program(
    model_dir: Path, tmp_path: Path
) -> None:
    script, log = tmp_path / "offline.py", tmp_path / "log"
    script.write_text(OFFLINE)
    log.touch()
    program = WarmProcess([str(script), str(model_dir)], log, environment())
    try:
        deadline = time.monotonic() + START_S
        while "READY" not in log.read_text():
            assert program.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(POLL_S)
        started = descendants(program.pid)
        assert len(started) >= 3
    finally:
        program.send_signal(signal.SIGKILL)
    assert still_alive(started) == []


STUCK = """
import importlib.util, multiprocessing, os, signal, sys, time

spec = importlib.util.spec_from_file_location("watchdog", sys.argv[1])
watchdog = importlib.util.module_from_spec(spec)
spec.loader.exec_module(watchdog)  # without the rest of vllm, which takes seconds

def never_answers(has_started):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    watchdog.follow_parent()
    has_started.set()
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for name in sys.argv[2:]:
        has_started = context.Event()
        child = context.Process(target=never_answers, args=(has_started,), name=name)
        child.start()
        has_started.wait()
        with open("pids", "a") as pids:  # not a pipe, which those left behind would hold open
            pids.write(f"{child.pid}\\n")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_stuck_processes_end_and_those_of_a_user_are_left_alone(tmp_path: Path) -> None:
    """All their signals are blocked, as in a call that never returns."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    names = ["EngineCore", "VllmWorker-1", "ApiServer_0", "Process-1"]
    command = [sys.executable, str(script), watchdog.__file__, *names]
    killed = subprocess.run(command, cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    pids = (tmp_path / "pids").read_text().split()
    *ours, users = (psutil.Process(int(pid)) for pid in pids)
    try:
        assert still_alive(ours) == []
        assert users.is_running()
    finally:
        users.kill()


FORKED = """
import importlib.util, multiprocessing, os, signal, sys, time

spec = importlib.util.spec_from_file_location("watchdog", sys.argv[1])
watchdog = importlib.util.module_from_spec(spec)
spec.loader.exec_module(watchdog)
context = multiprocessing.get_context("fork")

def worker():
    watchdog.follow_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)

def engine():
    watchdog.follow_parent()
    context.Process(target=worker, name="VllmWorker-0").start()
    time.sleep(600)

if __name__ == "__main__":
    child = context.Process(target=engine, name="EngineCore")
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""


def test_a_worker_that_was_forked_from_a_watching_engine_watches_too(tmp_path: Path) -> None:
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    command = [sys.executable, str(script), watchdog.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            engine, worker = (psutil.Process(int(program.stdout.readline())) for _ in range(2))
            engine.kill()
            assert still_alive([worker]) == []
        finally:
            program.kill()

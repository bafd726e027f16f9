# SPDX-License-Identifier: Apache-2.0
"""No process that an offline program started outlives it, even after SIGKILL.

tests/server/test_long_prompts.py checks the engine of a server.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.server.fork_server import ForkServer
from tests.server.process import POLL_S, START_S, environment, still_alive
from vllm.diffusion.process import watchdog

OFFLINE = """
import sys, time
from vllm import LLM

if __name__ == "__main__":
    llm = LLM(model=sys.argv[1], tensor_parallel_size=2, max_model_len=64)
    print("READY", flush=True)
    time.sleep(600)
"""


def test_an_engine_and_its_workers_end_with_an_offline_program(
    model_dir: Path, tmp_path: Path
) -> None:
    script, log = tmp_path / "offline.py", tmp_path / "log"
    script.write_text(OFFLINE)
    log.touch()
    program = ForkServer([str(script), str(model_dir)], log, environment())
    try:
        deadline = time.monotonic() + START_S
        while "READY" not in log.read_text():
            assert program.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(POLL_S)
        started = psutil.Process(program.pid).children(recursive=True)
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
    """The processes block all signals, as in a call that never returns."""
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
    print("worker", os.getpid(), flush=True)
    time.sleep(600)

def engine():
    watchdog.follow_parent()
    context.Process(target=worker, name="VllmWorker-0").start()
    time.sleep(600)

if __name__ == "__main__":
    child = context.Process(target=engine, name="EngineCore")
    child.start()
    print("engine", child.pid, flush=True)
    time.sleep(600)
"""


def test_a_worker_that_was_forked_from_a_watching_engine_watches_too(tmp_path: Path) -> None:
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    command = [sys.executable, str(script), watchdog.__file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            pids = dict(program.stdout.readline().split() for _ in range(2))  # in any order
            worker = psutil.Process(int(pids["worker"]))
            psutil.Process(int(pids["engine"])).kill()
            assert still_alive([worker]) == []
        finally:
            program.kill()

# SPDX-License-Identifier: Apache-2.0
"""Server processes for tests: start, wait until healthy, stop, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import psutil

from benchmarks.server_process import POLL_S, free_port, is_healthy
from tests.server.warm import WarmProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "llada-tiny"
MODEL_NAME = "llada-tiny"
SERVER = (sys.executable, "-m", "vllm.entrypoints.api_server")
START_S = 300.0  # the first start after an installation compiles all of upstream's modules
STOP_S = 120.0


class ServerFailed(Exception):
    """A server process did not do what was waited for; the message ends with its log's tail."""


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without the settings that other tests make for engines of theirs.

    The interpreter's own folder comes first on PATH: scripts find the same Python as the tests.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "DLLM_"))}
    return {
        **inherited,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # an engine imports nothing again
        **variables,
    }


class ServerProcess:
    """A server in a process group of its own.

    What begins with `SERVER` is forked from a process that has imported vllm.

    Args:
        command: the command line, without `--port`.
        log: file that takes its stdout and stderr.
        port: where it listens; None: the command is told a free one with `--port`.
        variables: environment variables on top of `environment()`.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        port: int | None = None,
        **variables: str,
    ) -> None:
        if port is None:
            port = free_port()
            command = [*command, "--port", str(port)]
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | WarmProcess
        if tuple(command[: len(SERVER)]) == SERVER:
            self._process = WarmProcess(command[1:], log, environment(**variables))
            return
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,  # not the repository: nothing may depend on the current folder
                env=environment(**variables),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for_line(self, pattern: str, timeout_s: float = 10.0) -> None:
        """A line of the log that ends so; it may be written a moment after an answer is sent."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern + "$", self.log(), re.MULTILINE):
            if time.monotonic() > deadline:
                raise self._failed(f"logged no line {pattern!r} within {timeout_s:g} s")
            time.sleep(POLL_S)

    def client(self, timeout_s: float = 120.0) -> httpx.Client:
        """A client that passes proxies by."""
        return httpx.Client(base_url=self.url, timeout=timeout_s, trust_env=False)

    def wait_until_healthy(self, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_healthy(self.url):
            if self._process.poll() is not None:
                raise self._failed(f"ended with status {self._process.returncode} at its start")
            if time.monotonic() > deadline:
                raise self._failed(f"was not healthy within {timeout_s:g} s")
            time.sleep(POLL_S)

    def has_ended(self) -> bool:
        """Whether the main process has ended."""
        return self._process.poll() is not None

    def terminate(self) -> None:
        """SIGTERM to the main process alone, as an init system or a container runtime sends it."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """The exit status of the main process."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failed(f"did not end within {timeout_s:g} s") from None

    def group_is_empty(self, timeout_s: float = 10.0) -> bool:
        """Whether no process of the group is left, the engine's included."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(POLL_S)
        return False

    def kill_engine(self) -> None:
        """SIGKILL to the engine's process, which upstream names."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        (engine,) = [child for child in children if "EngineCore" in "".join(child.cmdline())]
        engine.kill()

    def kill(self) -> None:
        """End every process of the group, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _failed(self, what: str) -> ServerFailed:
        tail = "\n".join(self.log().splitlines()[-60:])
        return ServerFailed(f"the server {what}; its log ends with:\n{tail}")

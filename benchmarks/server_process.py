# SPDX-License-Identifier: Apache-2.0
"""Server process for the duration of a block; all its processes are always ended.

    with ServerProcess(command, log, port=8901) as server:
        server.wait_until_healthy(600)
        session().post(f"{server.url}/generate", ...)

A guard process (benchmarks/process_guard.py) ends the server when the block is left, and when the
process of the block has ended, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import requests

from benchmarks.harness import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
GUARD = ROOT / "benchmarks" / "process_guard.py"
PORTS = range(20_000, 28_000)  # below the ports that Linux assigns to connections
START_S, STOP_S = 600.0, 60.0
POLL_S = 0.2
TAIL_LINES = 5
# `EXCEPTION: message` after the logger's prefix. The first one in a log is the cause.
CAUSE = re.compile(r"(?:^|[\s\]])((?!RuntimeError: Engine core init)\w*(?:Error|Exception): \S.*)")


class ServerFailed(BenchmarkError):
    """A server did not start, or ended; the message is one line with the end of its log."""


class ServerProcess:
    """Server on this machine that runs as long as the block.

    Args:
        command: the command line; it must make the server listen on `port` of 127.0.0.1.
        log: file for its output.
        port: see `command`.
        variables: environment variables on top of this process's.
        stop_s: seconds for an orderly end, after which the server is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        port: int,
        variables: Mapping[str, str] | None = None,
        stop_s: float = STOP_S,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, str(GUARD), str(stop_s), *command]
        self._environment = environment(variables or {})
        self._log = log

    def __enter__(self) -> ServerProcess:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as output:
            self._guard = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,  # the guard ends the server when this pipe is closed
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,  # Ctrl-C reaches this process alone
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait()
        except KeyboardInterrupt:  # interrupted again: do not wait for an orderly end
            self._guard.terminate()
            self._guard.wait()
            raise

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Return when /health answers 200.

        Raises:
            ServerFailed: the server has ended, or `timeout_s` seconds have passed.
        """
        deadline = time.monotonic() + timeout_s
        while not is_healthy(self.url):
            if self.has_ended():
                raise ServerFailed(f"the server ended at its start; {self.last_words()}")
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"the server was not healthy within {timeout_s:g} s; {self.last_words()}"
                )
            time.sleep(POLL_S)

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait up to `timeout_s` seconds; return whether the server has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return self._guard.returncode is not None

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the server that still run."""
        try:
            children: list[psutil.Process] = psutil.Process(self._guard.pid).children(
                recursive=True
            )
        except psutil.NoSuchProcess:
            return []
        return children

    def log_size(self) -> int:
        """Return the bytes of the log so far."""
        return self._log.stat().st_size

    def log_text(self, start: int = 0) -> str:
        """Return the log from byte `start` on."""
        with self._log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def last_words(self, start: int = 0) -> str:
        """Return the first exception in the log after byte `start`, and the last lines."""
        lines = [line.strip() for line in self.log_text(start).splitlines() if line.strip()]
        cause = next((match[1] for line in lines if (match := CAUSE.search(line))), None)
        prefix = f"{cause}; " if cause else ""
        return f"{prefix}its log ends with: {' | '.join(lines[-TAIL_LINES:])}"


@contextmanager
def model_server(folder: Path, log: Path, *arguments: object) -> Iterator[str]:
    """Run our server of a checkpoint until the block ends; yield its URL.

    Args:
        log: file for its output.
        arguments: further arguments of its command line.

    Raises:
        ServerFailed: The server ends, or is not ready in time.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.api_server", "--model", str(folder)]
    command += ["--port", str(port), *map(str, arguments)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths)}
    with ServerProcess(command, log, port=port, variables=variables) as server:
        server.wait_until_healthy(START_S)
        yield server.url


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment for a server, with `variables` on top.

    The interpreter's folder comes first on PATH, so that scripts find the same Python.
    """
    inherited = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**inherited, "PATH": path, **variables}


def free_port() -> int:
    """Return a port that nothing listens on and that no connection gets automatically.

    A server takes seconds to start, so another process may take the port before it.
    """
    ports = random.SystemRandom().sample(PORTS, len(PORTS))
    return next(port for port in ports if is_free(port))


def is_free(port: int) -> bool:
    """Whether a server of this machine may listen on a port."""
    with socket.socket() as wanted:
        wanted.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            wanted.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def session() -> requests.Session:
    """Make a client for servers on this machine; it ignores proxies."""
    client = requests.Session()
    client.trust_env = False
    return client


def metric(url: str, name: str) -> float:
    """Return the sum of the server's metrics whose names match."""
    with session() as http:
        text = http.get(f"{url}/metrics", timeout=30).text
    return sum(map(float, re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.M)))


def resident_mib() -> float:
    """Return the resident memory, in MiB, of the processes that this process has started."""
    children = psutil.Process().children(recursive=True)
    return float(sum(child.memory_info().rss for child in children) / 2**20)


def is_healthy(url: str) -> bool:
    """Whether the server at `url` answers /health with 200."""
    with session() as http:
        try:
            return http.get(f"{url}/health", timeout=10.0).status_code == 200
        except requests.RequestException:
            return False

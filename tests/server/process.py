# SPDX-License-Identifier: Apache-2.0
"""Server processes for tests: start, wait until healthy, stop, and remove all descendants."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import httpx
import psutil

from benchmarks.server_process import free_port, is_healthy
from tests.programs import PATIENCE_S, POLL_S, ROOT
from tests.server.fork_server import ForkServer

MODEL = ROOT / "models" / "llada-tiny"
MODEL_NAME = "llada-tiny"
SERVER = (sys.executable, "-m", "vllm.entrypoints.api_server")
START_S = 300.0  # seconds; the first start after an installation compiles upstream's modules
STOP_S = 120.0
KEEP_ALIVE_S = 2.0  # seconds; a server closes an idle connection after 5


class ServerFailed(Exception):
    """A server did not reach an expected state. The message ends with the last lines of its log."""


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of this process without variables that tests of engines set.

    The interpreter's own folder is the first one of PATH, so that scripts use the Python of the
    tests.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "DLLM_"))}
    return {
        **inherited,
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # an engine need not import modules again
        **variables,
    }


class ServerProcess:
    """A server in its own process group.

    Commands of this Python interpreter are forked from a process that has imported vLLM.

    Args:
        command: the command line, without `--port`.
        log: file for stdout and stderr.
        port: port of the server; None adds `--port` with a free one.
        variables: environment variables in addition to `environment()`.
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
        self._process: subprocess.Popen[bytes] | ForkServer
        if command[0] == sys.executable:
            self._process = ForkServer(command[1:], log, environment(**variables))
            return
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,  # not the repository: no program may depend on the current folder
                env=environment(**variables),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self, start: int = 0) -> str:
        """Return the log from byte `start` on."""
        with self._log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def log_size(self) -> int:
        """Return the number of bytes of the log so far."""
        return self._log.stat().st_size

    def wait_for_line(self, pattern: str) -> None:
        """Wait for a log line that ends with the pattern; it may follow an answer by a moment."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern + "$", self.log(), re.MULTILINE):
            if time.monotonic() > deadline:
                raise self._failed(f"logged no line {pattern!r} within {PATIENCE_S:g} s")
            time.sleep(POLL_S)

    def client(self, timeout_s: float = 120.0) -> httpx.Client:
        """Return a client without proxies that reuses no connection the server may be closing."""
        limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
        return httpx.Client(base_url=self.url, timeout=timeout_s, limits=limits, trust_env=False)

    def wait_until_healthy(self, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_healthy(self.url):
            if self._process.poll() is not None:
                raise self._failed(f"ended with status {self._process.returncode} at its start")
            if time.monotonic() > deadline:
                raise self._failed(f"was not healthy within {timeout_s:g} s")
            time.sleep(POLL_S)

    def has_ended(self) -> bool:
        """Return whether the main process has ended."""
        return self._process.poll() is not None

    def terminate(self) -> None:
        """Send SIGTERM to the main process alone, as an init system or a container runtime does."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = STOP_S) -> int:
        """Wait for the main process and return its exit status."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self._failed(f"did not end within {timeout_s:g} s") from None

    def group_is_empty(self) -> bool:
        """Return whether all processes of the group end within a minute, including the engine."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(POLL_S)
        return False

    def descendants(self) -> list[psutil.Process]:
        """Return all descendants of the main process."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        """Return the engine's process, which is found by upstream's name."""
        (engine,) = named(self.descendants(), "EngineCore")
        return engine

    def wait_until_unhealthy(self) -> None:
        """Wait until /health returns 503 or the server has ended by itself."""
        deadline = time.monotonic() + PATIENCE_S
        with self.client() as http:
            while not self.has_ended():
                if time.monotonic() > deadline:
                    raise self._failed("is still healthy")
                # The port closes before the process ends.
                with contextlib.suppress(httpx.TransportError):
                    if http.get("/health").status_code == 503:
                        return
                time.sleep(POLL_S)

    def kill(self) -> None:
        """Kill every process of the group, whatever its state."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _failed(self, what: str) -> ServerFailed:
        tail = "\n".join(self.log().splitlines()[-60:])
        return ServerFailed(f"the server {what}; its log ends with:\n{tail}")


@contextlib.contextmanager
def healthy(*processes: ServerProcess) -> Iterator[None]:
    """Wait until the servers are healthy, and kill their process groups at the end."""
    try:
        for process in processes:
            process.wait_until_healthy()
        yield
    finally:
        for process in processes:
            process.kill()


def named(processes: Iterable[psutil.Process], title: str) -> list[psutil.Process]:
    """Return the processes with `title` in their command lines, which upstream sets."""
    results = []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # the process has just ended
            if title in "".join(process.cmdline()):
                results.append(process)
    return results


def still_alive(processes: list[psutil.Process]) -> list[str]:
    """Wait for the processes to end, and describe the ones that do not."""
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    lines = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                lines.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
    return lines


def is_error(answer: Future[httpx.Response]) -> bool:
    """Return whether the answer is a server error or its connection was closed."""
    try:
        return answer.result(PATIENCE_S).status_code >= 500
    except httpx.TransportError:
        return True

# SPDX-License-Identifier: Apache-2.0
"""Server processes for tests: start, wait until healthy, stop, and leave nothing behind."""

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
from tests.programs import ROOT
from tests.server.fork_server import ForkServer

MODEL = ROOT / "models" / "llada-tiny"
MODEL_NAME = "llada-tiny"
SERVER = (sys.executable, "-m", "vllm.entrypoints.api_server")
START_S = 300.0  # the first start after an installation compiles all of upstream's modules
STOP_S = 120.0
PATIENCE_S = 60.0  # with what takes a moment: a busy machine must not fail a test
POLL_S = 0.05
KEEP_ALIVE_S = 2.0  # a server keeps a connection for 5 s


class ServerFailed(Exception):
    """A server process did not do what was waited for; the message ends with its log's tail."""


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without the settings that other tests make for engines of theirs.

    The interpreter's own folder comes first on PATH: scripts find the same Python as the tests.
    """
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "DLLM_"))}
    return {
        **inherited,
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # an engine imports nothing again
        **variables,
    }


class ServerProcess:
    """A server in a process group of its own.

    What this interpreter runs is forked from a process that has imported vllm.

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
                cwd=log.parent,  # not the repository: nothing may depend on the current folder
                env=environment(**variables),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self, start: int = 0) -> str:
        """The log from byte `start` on."""
        with self._log.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def log_size(self) -> int:
        """Bytes of the log so far."""
        return self._log.stat().st_size

    def wait_for_line(self, pattern: str) -> None:
        """A line of the log that ends so; it may be written a moment after an answer is sent."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern + "$", self.log(), re.MULTILINE):
            if time.monotonic() > deadline:
                raise self._failed(f"logged no line {pattern!r} within {PATIENCE_S:g} s")
            time.sleep(POLL_S)

    def client(self, timeout_s: float = 120.0) -> httpx.Client:
        """A client that passes proxies by, and no connection that the server may be closing."""
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

    def group_is_empty(self) -> bool:
        """Whether no process of the group is left, the engine's included."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return True
            time.sleep(POLL_S)
        return False

    def descendants(self) -> list[psutil.Process]:
        """The processes below the main one."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        """The process of the engine, which upstream names."""
        (engine,) = named(self.descendants(), "EngineCore")
        return engine

    def wait_until_unhealthy(self) -> None:
        """Until /health says 503, or the server has ended by itself."""
        deadline = time.monotonic() + PATIENCE_S
        with self.client() as http:
            while not self.has_ended():
                if time.monotonic() > deadline:
                    raise self._failed("is still healthy")
                with contextlib.suppress(httpx.TransportError):  # it closes its port before it ends
                    if http.get("/health").status_code == 503:
                        return
                time.sleep(POLL_S)

    def kill(self) -> None:
        """End every process of the group, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _failed(self, what: str) -> ServerFailed:
        tail = "\n".join(self.log().splitlines()[-60:])
        return ServerFailed(f"the server {what}; its log ends with:\n{tail}")


@contextlib.contextmanager
def healthy(*processes: ServerProcess) -> Iterator[None]:
    """Servers, side by side: healthy at the start, none left at the end."""
    try:
        for process in processes:
            process.wait_until_healthy()
        yield
    finally:
        for process in processes:
            process.kill()


def named(processes: Iterable[psutil.Process], title: str) -> list[psutil.Process]:
    """Those with a word in their command lines, which upstream sets."""
    results = []
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has just ended
            if title in "".join(process.cmdline()):
                results.append(process)
    return results


def still_alive(processes: list[psutil.Process]) -> list[str]:
    """Those that do not end by themselves."""
    _, alive = psutil.wait_procs(processes, PATIENCE_S)
    lines = []
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                lines.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
    return lines


def is_error(answer: Future[httpx.Response]) -> bool:
    """An error answer, or a connection that was closed."""
    try:
        return answer.result(PATIENCE_S).status_code >= 500
    except httpx.TransportError:
        return True

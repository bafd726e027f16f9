# SPDX-License-Identifier: Apache-2.0
"""Python programs forked from a process that has imported vllm: half a minute less for a server.

`python -m tests.server.warm` is that process: it reads a line of JSON a program, forks, and runs
the program in the child, as `python ...` would. It tells the child's pid, and later how it ended.
`WarmProcess` is the other side.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import time
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import setproctitle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

POLL_S = 0.05
# What a server and its engine import on their way to the first answer, the engine a fork of it.
NEEDED = (
    "vllm.entrypoints.api_server",
    *("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor"),
    *("vllm.diffusion.engine.scheduler", "vllm.diffusion.engine.worker"),
)


class WarmProcess:
    """A program, with what `subprocess.Popen` has of it, in a session of its own.

    Args:
        arguments: of the interpreter: `-m` and a module, or a file; then the program's.
        log: file that takes its stdout and stderr; it runs in the folder of that.
        variables: its environment, but for what importing vllm adds.
    """

    def __init__(self, arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        told = {"arguments": [*arguments], "log": str(log), "variables": {**variables}}
        self.args = [*arguments]
        self._parent = _parent()
        self.pid = self._parent.start(told)

    def poll(self) -> int | None:
        return self._parent.status_of(self.pid)

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float = float("inf")) -> int:
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class _Parent:
    """The process that forks. It ends when this one does, whose pipe it reads."""

    def __init__(self) -> None:
        from tests.server.process import ROOT, environment

        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # nothing that was read lies where select does not see it
            cwd=ROOT,
            env=environment(),
        )
        self._status: dict[int, int] = {}

    def start(self, told: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        return int(self._told("started")["started"])

    def status_of(self, pid: int) -> int | None:
        while pid not in self._status and self._has_line():
            self._told("ended")
        return self._status.get(pid)

    def _told(self, wanted: str) -> dict[str, int]:
        """The next line of this kind; those before it are of servers that have ended."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            told: dict[str, int] = json.loads(line)
            if "ended" in told:
                self._status[told["ended"]] = told["status"]
            if wanted in told:
                return told
        raise RuntimeError("the process that forks has ended")

    def _has_line(self) -> bool:
        return bool(select.select([self._process.stdout], [], [], 0)[0])


@cache
def _parent() -> _Parent:
    return _Parent()


def forked() -> dict[str, Any] | None:
    """Fork a child for each line of stdin: what it says in the child, None at the end of stdin."""
    while True:
        if select.select([0], [], [], POLL_S)[0]:
            line = sys.stdin.readline()
            if not line:
                return None
            if not (pid := os.fork()):
                told: dict[str, Any] = json.loads(line)
                return told
            tell(started=pid)
        tell_who_ended()


def tell(**what: int) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def tell_who_ended() -> None:
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            tell(ended=pid, status=os.waitstatus_to_exitcode(status))
    except ChildProcessError:
        pass


def run(
    arguments: Sequence[str], log: str, variables: Mapping[str, str], added: Mapping[str, str]
) -> None:
    """What the interpreter does with these arguments, in a session of its own.

    `added` is what importing set of the environment. It stands last there: setproctitle of a
    spawned engine looks for its place beside the first variable, which importing must not touch.
    """
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for given, number in ((null, 0), (output, 1), (output, 2)):
        os.dup2(given, number)
    os.chdir(os.path.dirname(log))
    os.environ.clear()
    os.environ.update(variables)
    for name, value in added.items():
        os.environ.setdefault(name, value)
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        # This process has imported it already; a user's has not.
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _given = {**os.environ}
    for _name in NEEDED:
        importlib.import_module(_name)
    setproctitle.getproctitle()  # finds its place in memory by the environment that is still there
    gc.collect()
    gc.freeze()  # the garbage collector of a program leaves alone what all of them share
    _added = {name: value for name, value in os.environ.items() if _given.get(name) != value}
    if (_told := forked()) is not None:
        run(**_told, added=_added)

# SPDX-License-Identifier: Apache-2.0
"""Python programs forked from a process that has imported vLLM, which saves half a minute each.

`python -m tests.server.fork_server FD` is the forking process. It accepts connections on a
listening socket. Each connection sends a program as a line of JSON. The process forks, and the
child runs the program as `python ...` would. The process sends the child's pid on that connection,
and later its exit status. `ForkServer` is the other side. The processes of pytest-xdist share one
forking process (`share`), which imports vLLM for the first program.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POLL_S = 0.05
ADDRESS = "MOSAIC_TESTS_WARM"  # variable with the path of the shared process's socket
# Modules that a server, its engine (a fork of it) and an offline program import until their first
# answer.
NEEDED = (
    *("vllm.entrypoints.api_server", "vllm.entrypoints.launchers.api_server.entry"),
    *("vllm.diffusion.api.server.cli", "vllm.diffusion.api.server.endpoint"),
    *("vllm.entrypoints.anthropic.serving", "vllm.entrypoints.llm"),
    *("vllm.v1.engine.async_llm", "vllm.v1.engine.core"),
    *("vllm.v1.executor.multiproc_executor", "vllm.v1.executor.uniproc_executor"),
    *("vllm.diffusion.engine.scheduler.scheduler", "vllm.diffusion.engine.worker.worker"),
)


class ForkServer:
    """A program in its own session, with the methods of `subprocess.Popen` that tests use.

    Args:
        arguments: arguments of the interpreter (`-m` and a module, or a file), then of the program.
        log: file for stdout and stderr. The program runs in the folder of this file.
        variables: environment of the program. Variables that importing vLLM sets are added.
    """

    def __init__(self, arguments: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        report = {"arguments": [*arguments], "log": str(log), "variables": {**variables}}
        self.args = [*arguments]
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.environ.get(ADDRESS) or _parent()[0])
        self._connection.sendall(json.dumps(report).encode() + b"\n")
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        # Unbuffered, because select does not report bytes that are already in a buffer.
        with self._connection.makefile("rb", buffering=0) as numbers:
            line = numbers.readline()
        if not line:
            raise RuntimeError("the process that forks has ended")
        return int(line)

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._number()
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def share() -> None:
    """Make the processes that this one starts (of pytest-xdist) use the same forking process."""
    os.environ[ADDRESS], _ = _parent()


@cache
def _parent() -> tuple[str, subprocess.Popen[bytes]]:
    """Start the forking process and return its address.

    The process reads a pipe of this process, and therefore ends when this process ends.
    """
    from tests.programs import ROOT
    from tests.server.process import environment

    address = tempfile.mkdtemp(prefix="mosaic-tests-") + "/warm"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.fork_server", str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=(listener.fileno(),),
            cwd=ROOT,
            env=environment(),
        )
    return address, process


def forked(listener: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each connection.

    Returns the program in the child, and None in the parent at the end of stdin.
    """
    children: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([0, listener], [], [], POLL_S)
        if 0 in readable:
            return None
        if readable:
            connection, _ = listener.accept()
            with connection.makefile("rb") as lines:
                message: dict[str, Any] = json.loads(lines.readline())
            added = import_what_is_needed()
            if not (pid := os.fork()):
                for other in (listener, connection, *children.values()):
                    other.close()
                return {**message, "added": added}
            children[pid] = connection
            tell(connection, pid)
        tell_who_ended(children)


def tell(connection: socket.socket, number: int) -> None:
    with suppress(ConnectionError):  # the process that started the program has ended
        connection.sendall(b"%d\n" % number)


def tell_who_ended(children: dict[int, socket.socket]) -> None:
    while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        pid, status = ended
        with children.pop(pid) as connection:
            tell(connection, os.waitstatus_to_exitcode(status))


@cache
def import_what_is_needed() -> dict[str, str]:
    """Import the modules that programs share, once, and return the variables that this has set."""
    import setproctitle

    given = {**os.environ}
    gc.disable()
    for name in NEEDED:
        importlib.import_module(name)
    gc.enable()
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm import plugins

    make_arg_parser(FlexibleArgumentParser())  # caches the arguments of all configuration classes
    plugins.plugins_loaded = False  # each program loads the plugins itself
    # setproctitle finds its memory by the environment, which is still unchanged here.
    setproctitle.getproctitle()
    gc.collect()
    gc.freeze()  # programs do not collect the objects that all of them share
    return {name: value for name, value in os.environ.items() if given.get(name) != value}


def has_peer(connection: socket.socket) -> bool:
    with suppress(OSError):
        return bool(connection.getpeername())
    return False


def leave_the_port() -> None:
    """Replace each listening port that this fork has inherited with /dev/null.

    A spawned engine does not inherit ports either. A server that ends searches for other processes
    at its port, and fails if one of them has just been killed.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:  # skips other files
            if one.family in (socket.AF_INET, socket.AF_INET6) and not has_peer(one):
                os.dup2(null, number)
    os.close(null)


def run(
    arguments: Sequence[str], log: str, variables: Mapping[str, str], added: Mapping[str, str]
) -> None:
    """Run Python with these arguments as the interpreter would, in a new session.

    `added` are the variables that importing has set. They come last in the environment, because
    setproctitle of a spawned engine finds its memory next to the first variable, which must not
    change.
    """
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for given, number in ((null, 0), (output, 1), (output, 2)):
        os.dup2(given, number)
    os.chdir(os.path.dirname(log))
    os.register_at_fork(after_in_child=leave_the_port)
    os.environ.clear()
    os.environ.update(variables)
    for name, value in added.items():
        os.environ.setdefault(name, value)
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        # The warning is about a module that only this process has imported before.
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [*arguments]
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _folder = Path(_listener.getsockname()).parent
        _message = forked(_listener)
    if _message is not None:
        run(**_message)
    else:
        shutil.rmtree(_folder)

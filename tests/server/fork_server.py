# SPDX-License-Identifier: Apache-2.0
"""Python programs forked from a process that has imported vllm: half a minute less for a server.

`python -m tests.server.fork_server FD` is that process. It accepts connections on a listening
socket. Each connection sends a program as a line of JSON; the process forks, and the child runs the
program as `python ...` would. It sends the child's pid on that connection, and later how it ended.
`ForkServer` is the other side. The processes of pytest-xdist share one (`share`), which imports
vLLM when first needed.
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
# What a server and its engine import on their way to the first answer, the engine a fork of it, and
# an offline program.
NEEDED = (
    *("vllm.entrypoints.api_server", "vllm.entrypoints.launchers.api_server.entry"),
    *("vllm.diffusion.api.server.cli", "vllm.diffusion.api.server.endpoint"),
    *("vllm.entrypoints.anthropic.serving", "vllm.entrypoints.llm"),
    *("vllm.v1.engine.async_llm", "vllm.v1.engine.core"),
    *("vllm.v1.executor.multiproc_executor", "vllm.v1.executor.uniproc_executor"),
    *("vllm.diffusion.engine.scheduler.scheduler", "vllm.diffusion.engine.worker.worker"),
)


class ForkServer:
    """A program, with what `subprocess.Popen` has of it, in a session of its own.

    Args:
        arguments: of the interpreter: `-m` and a module, or a file; then the program's.
        log: file that takes its stdout and stderr; it runs in the folder of that.
        variables: its environment, but for what importing vllm adds.
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
        # Unbuffered: nothing that was read lies where select does not see it.
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
    """Let the processes that this one starts, those of pytest-xdist, fork from the same one."""
    os.environ[ADDRESS], _ = _parent()


@cache
def _parent() -> tuple[str, subprocess.Popen[bytes]]:
    """The process that forks, and its address. It ends with this one, whose pipe it reads."""
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
    """Fork a child for each connection: what it says in the child, None at the end of stdin."""
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
    with suppress(ConnectionError):  # who started the program has ended
        connection.sendall(b"%d\n" % number)


def tell_who_ended(children: dict[int, socket.socket]) -> None:
    while children and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        pid, status = ended
        with children.pop(pid) as connection:
            tell(connection, os.waitstatus_to_exitcode(status))


@cache
def import_what_is_needed() -> dict[str, str]:
    """Import what programs share, once; returns the variables that importing has set."""
    import setproctitle

    given = {**os.environ}
    gc.disable()
    for name in NEEDED:
        importlib.import_module(name)
    gc.enable()
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm import plugins

    make_arg_parser(FlexibleArgumentParser())  # what it reads of all classes is kept
    plugins.plugins_loaded = False  # each program loads them, as part of what it does
    setproctitle.getproctitle()  # finds its place in memory by the environment that is still there
    gc.collect()
    gc.freeze()  # the garbage collector of a program leaves alone what all of them share
    return {name: value for name, value in os.environ.items() if given.get(name) != value}


def has_peer(connection: socket.socket) -> bool:
    with suppress(OSError):
        return bool(connection.getpeername())
    return False


def leave_the_port() -> None:
    """Put /dev/null in the place of each port that this process, a fork, was given with its memory.

    A spawned engine has none either. A server that ends looks for others at its port, and is in
    trouble where one of them has just been killed.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:  # else no socket
            if one.family in (socket.AF_INET, socket.AF_INET6) and not has_peer(one):
                os.dup2(null, number)
    os.close(null)


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
    os.register_at_fork(after_in_child=leave_the_port)
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
    with socket.socket(fileno=int(sys.argv[1])) as _listener:
        _folder = Path(_listener.getsockname()).parent
        _told = forked(_listener)
    if _told is not None:
        run(**_told)
    else:
        shutil.rmtree(_folder)

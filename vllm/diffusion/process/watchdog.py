# SPDX-License-Identifier: Apache-2.0
"""Watchdog that ends every process of a server when its parent process ends for any reason.

Upstream ends its children in its own shutdown. After SIGKILL, or if a Python process ends without
cleaning up, there is no shutdown, and an engine would keep its GPU memory until somebody finds it.
Conversely, a server can list the processes of its engines and wait for their ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import threading
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

_GRACE_S = 1.0  # seconds for an orderly end, in which one rank ends first
_START_GRACE_S = 3.0  # seconds in which upstream reports why an engine did not start
# Set when the server's lifecycle starts to watch the engines.
is_served = threading.Event()

# Names of the processes that upstream starts and in which it loads plugins.
_PROCESS_NAMES = ("EngineCore", "VllmWorker-", "ApiServer_")
_watching_pid: int | None = None  # a fork inherits the variable, but no thread


def follow_parent() -> None:
    """In a child of upstream's, end this process when its parent ends.

    Other processes, including a user's own, are not affected. Repeated calls have no effect.
    """
    global _watching_pid
    parent = multiprocessing.parent_process()
    is_ours = multiprocessing.current_process().name.startswith(_PROCESS_NAMES)
    if parent is None or not is_ours or _watching_pid == os.getpid():
        return
    _watching_pid = os.getpid()
    threading.Thread(
        target=_end_with, args=(parent.pid, parent.sentinel), name="watchdog", daemon=True
    ).start()


def follow_ranks(pids: Sequence[int]) -> None:
    """In a rank that computes with others, end this process when one of them ends.

    Otherwise it would wait for that rank until upstream's executor gives up.
    """
    ends = []
    for pid in pids:
        with contextlib.suppress(AttributeError, OSError):
            ends.append(os.pidfd_open(pid))
    if ends:
        threading.Thread(target=_end_with_ranks, args=(ends,), name="ranks", daemon=True).start()


def follow_engine(sentinel: int) -> None:
    """In a starting server, end this process if its engine ends before `is_served`.

    Upstream may wait for the engine for minutes.
    """
    threading.Thread(target=_end_with_engine, args=(sentinel,), name="engine", daemon=True).start()


def engine_processes() -> dict[int, str]:
    """Return the engines on this host of this process's server: title by process id.

    They are children of the server's first process, which may have started this process, too.
    """
    process = psutil.Process()
    server = process if multiprocessing.parent_process() is None else process.parent()
    processes = {}
    for child in [] if server is None else server.children():
        with contextlib.suppress(psutil.Error):  # the process has just ended
            title = child.cmdline()[0] if child.cmdline() else ""
            if "EngineCore" in title:
                processes[child.pid] = title.partition("::")[2] or title
    return processes


def _end_with_ranks(ends: list[int]) -> None:
    multiprocessing.connection.wait(ends)
    time.sleep(_GRACE_S)
    _end(f"process {os.getpid()} ends: another rank is gone")


def _end_with_engine(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    if not is_served.wait(_START_GRACE_S):
        _end("error: the engine ended before the server was ready")


def _end_with(parent_pid: int | None, sentinel: int) -> None:
    """Wait for the parent's end, then end this process immediately.

    A forked sibling may keep the sentinel open, because it is a pipe. The process descriptor does
    not have this problem, but not every system supports it.
    """
    ends = [sentinel]
    with contextlib.suppress(AttributeError, OSError):
        ends.append(os.pidfd_open(parent_pid))  # type: ignore[arg-type]
    multiprocessing.connection.wait(ends)
    _end(f"process {os.getpid()} ends: process {parent_pid}, which started it, is gone")


def _end(message: str) -> None:
    """Write a line to stderr, which may be closed, and end this process immediately."""
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode())
    os._exit(1)

# SPDX-License-Identifier: Apache-2.0
"""Watchdog: no process of a server outlives the one that started it, however that one ended.

Upstream ends its children in its own shutdown. After SIGKILL, or the end of a Python process that
cleaned nothing up, there is none: an engine would keep its GPU memory until somebody finds it.
The other way round, a server knows the processes of its engines and can wait for their ends.
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

_GRACE_S = 1.0  # for an orderly end, in which one rank is the first
_START_GRACE_S = 3.0  # in which upstream says why an engine did not start
is_served = threading.Event()  # from when on a server hears of an engine's end by its lifecycle

# Names of the processes that upstream starts and in which it loads plugins.
_PROCESS_NAMES = ("EngineCore", "VllmWorker-", "ApiServer_")
_watching_pid: int | None = None  # a fork takes the variable along, and no thread


def follow_parent() -> None:
    """In a child of upstream's, end this process when its parent is gone.

    Other processes, a user's own among them, are left alone. Repeated calls have no effect.
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
    """In a rank that computes with others, end this process when one of these is gone.

    Otherwise it would wait for that one until upstream's executor gives it up.
    """
    ends = []
    for pid in pids:
        with contextlib.suppress(AttributeError, OSError):
            ends.append(os.pidfd_open(pid))
    if ends:
        threading.Thread(target=_end_with_ranks, args=(ends,), name="ranks", daemon=True).start()


def follow_engine(sentinel: int) -> None:
    """In a server that starts, end this process when its engine ends before `is_served`.

    Upstream may wait for that one for minutes.
    """
    threading.Thread(target=_end_with_engine, args=(sentinel,), name="engine", daemon=True).start()


def engine_processes() -> dict[int, str]:
    """Return the engines on this host of the server that this process serves: title by process id.

    They are children of the server's first process, which may have started this one, too.
    """
    process = psutil.Process()
    server = process if multiprocessing.parent_process() is None else process.parent()
    processes = {}
    for child in [] if server is None else server.children():
        with contextlib.suppress(psutil.Error):  # it has just ended
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
    """Wait for the parent's end, then end this process at once.

    The sentinel is a pipe, which a forked sibling may hold open; the process descriptor is not,
    but not every system has one.
    """
    ends = [sentinel]
    with contextlib.suppress(AttributeError, OSError):
        ends.append(os.pidfd_open(parent_pid))  # type: ignore[arg-type]
    multiprocessing.connection.wait(ends)
    _end(f"process {os.getpid()} ends: process {parent_pid}, which started it, is gone")


def _end(message: str) -> None:
    """Write a line to stderr, which may be gone, and end this process at once."""
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode())
    os._exit(1)

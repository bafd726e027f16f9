#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run a command so that none of its processes outlives the process that started this one.

    process_guard.py GRACE_S COMMAND [ARGUMENT...]

The command gets its own process group. It is ended when standard input ends: because the starter
closed it, or because the starter has ended, for whatever reason. Then the command receives SIGTERM,
and after GRACE_S seconds the remaining processes of its group receive SIGKILL. If this process
receives SIGTERM, they receive SIGKILL at once. The same happens to the other processes of the group
when the command ends by itself. Exit status: the command's, or 128 plus the number of the signal
that ended it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import psutil

POLL_S = 0.1
STRAGGLERS_S = 10.0  # seconds for processes of the group that outlive the command, at most
KILL_S = 10.0  # seconds for processes that received SIGKILL


class EndNow(BaseException):
    """SIGTERM was received: there is no time for an orderly end."""


def main(arguments: list[str]) -> int:
    """Run the command; return the exit status."""
    grace_s, command = float(arguments[0]), arguments[1:]
    signal.signal(signal.SIGTERM, _end_now)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"error: {command[0]}: {error.strerror}\n")
        return 127
    try:
        wait_for_end(process)
        end(process, grace_s)
    except (EndNow, KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        kill_group(process.pid)
    status = process.wait()
    return 128 - status if status < 0 else status


def _end_now(*_: object) -> None:
    raise EndNow


def wait_for_end(process: subprocess.Popen[bytes]) -> None:
    """Return when the command or standard input has ended."""
    while process.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            return


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGTERM to the command, which ends its own workers, then to the remaining processes."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
        signal_group(process.pid, signal.SIGTERM)
        wait_for_group(process.pid, min(STRAGGLERS_S, grace_s))


def kill_group(group: int) -> None:
    """Kill the remaining processes of a group."""
    signal_group(group, signal.SIGKILL)
    wait_for_group(group, KILL_S)


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to every process of a group, which may be empty."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def wait_for_group(group: int, timeout_s: float) -> None:
    """Return when a process group is empty, or after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while living_members(group) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def living_members(group: int) -> list[int]:
    """Return the processes of a group, except dead processes that were not waited for yet."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            is_member = os.getpgid(process.pid) == group
            if is_member and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

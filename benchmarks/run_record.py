# SPDX-License-Identifier: Apache-2.0
"""Conditions of a run in addition to the device: machine, software, commit, command.

This module does not import torch, because a process that only observes a GPU must not take memory
on it.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "vllm")


def software_record() -> dict[str, Any]:
    """Start the record of a run; the caller adds the device."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(["python", *map(_relative, sys.argv)]),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "machine": platform.machine(),
        "num_cpus": len(os.sched_getaffinity(0)),
    }


def first_line(*command: str) -> str | None:
    """Return the first line that a command prints; None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _relative(argument: str) -> str:
    """Shorten a path inside the repository to the part below its root."""
    path = Path(argument)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else argument


def _commit() -> str | None:
    """Return the commit of the sources, marked if they differ from it; None outside a checkout.

    For a copy of the sources without their history, the variable MOSAIC_COMMIT gives the commit.
    """
    return os.environ.get("MOSAIC_COMMIT") or first_line(
        "git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

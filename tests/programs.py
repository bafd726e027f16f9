# SPDX-License-Identifier: Apache-2.0
"""The repository, and programs that tests run in it."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120
PATIENCE_S = 60.0  # seconds for a short operation, so that a busy machine fails no test
POLL_S = 0.05


def run(*command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and keep both output streams as text.

    Args:
        command: the words, which may be paths and numbers.
        options: arguments of `subprocess.run`.
    """
    kept = {"capture_output": True, "text": True, "timeout": TIMEOUT_S, **options}
    return subprocess.run([str(word) for word in command], check=False, **kept)


def add_program(path: Path, text: str) -> None:
    """Write an executable file; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run_python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this interpreter to its end, as `run` does."""
    return run(sys.executable, *arguments, **options)


def output_of(*command: Any, **options: Any) -> str:
    """Return the output of a program that must succeed."""
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for(is_met: Callable[[], bool]) -> None:
    """Wait until a condition is met, for at most a minute."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_met():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(POLL_S)

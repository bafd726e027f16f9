# SPDX-License-Identifier: Apache-2.0
"""Copies of the scripts, with a recorder in place of the virtual environment's Python."""

import os
import subprocess
import sys
from pathlib import Path

from tests import programs

# Prints its arguments and two variables, one per line.
RECORDER = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word"; done
printf 'PYTHONPATH=%s\\nLONG=%s\\n' "$PYTHONPATH" "$VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""


def run(
    script: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return programs.run(script, *arguments, env={"PATH": os.environ["PATH"], **(env or {})})


def add_recorder(home: Path, text: str = RECORDER) -> None:
    """Put the recorder at .venv/bin/python; a real interpreter still serves `python -c`."""
    text = text.replace("\n", f'\n[ "$1" = -c ] && exec {sys.executable} "$@"\n', 1)
    programs.add_program(home / ".venv" / "bin" / "python", text)

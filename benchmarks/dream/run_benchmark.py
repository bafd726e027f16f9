#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The longest Dream request and the cost of its steps; see context_length/runner.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.context_length.runner import main

if __name__ == "__main__":
    sys.exit(main("dream"))

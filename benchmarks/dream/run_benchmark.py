#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The longest Dream request and what its steps cost; see benchmarks/context_length/runner.py.

    benchmarks/dream/run_benchmark.py --model-path CHECKPOINT --output-dir results/dream \
        --start 8192 --step 8192 --max 204800 --precision 1024
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.context_length.runner import main

if __name__ == "__main__":
    sys.exit(main("dream"))

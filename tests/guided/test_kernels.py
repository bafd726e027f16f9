# SPDX-License-Identifier: Apache-2.0
"""The kernels of joint choices, run by Triton's interpreter; on a GPU: tests/native."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = """
from tests.guided.joint_kernels import check
check("cpu", 0, 0.8, num_requests=1)
"""


def test_kernels_choose_what_the_host_does() -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]

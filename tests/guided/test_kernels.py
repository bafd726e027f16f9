# SPDX-License-Identifier: Apache-2.0
"""The kernels of joint choices, run by Triton's interpreter; on a GPU: tests/native."""

from __future__ import annotations

from tests.interpreted import run_interpreted

INTERPRETED = """
from tests.guided.joint_kernels import check
check("cpu", 0, 0.8, num_requests=1)
"""


def test_kernels_choose_what_the_host_does() -> None:
    run_interpreted(INTERPRETED)

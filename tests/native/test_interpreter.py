# SPDX-License-Identifier: Apache-2.0
"""Triton kernels themselves on CPU tensors: one file, so that one process runs all programs."""

import pytest

from gather_gemm import is_built
from tests.interpreted import run_interpreted
from tests.native import test_gather_gemm, test_grouped_gemm, test_routing

PROGRAMS = {
    "gather_gemm": test_gather_gemm.INTERPRETED,
    "grouped_gemm": test_grouped_gemm.INTERPRETED,
    "routing": test_routing.INTERPRETED,
    "split_attention": "from tests.models.test_attention import run_split as r; r()",
    "joint": "from tests.guided.joint_kernels import check; check('cpu', 0, 0.8, num_requests=1)",
}


@pytest.mark.skipif(not is_built(), reason="Triton is not installed")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_kernels_under_the_interpreter(program):
    run_interpreted(program)

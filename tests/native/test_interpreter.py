# SPDX-License-Identifier: Apache-2.0
"""Triton kernels run on CPU tensors. All tests are here, so that one process runs all programs."""

import pytest

from gather_gemm import is_built
from tests.interpreted import run_interpreted

GATHER_GEMM = """
import torch
from gather_gemm import _ops, _triton, gather_top
from tests.native.support import (
    SHAPES, TOP_SHAPES, check_gather, check_top, masks_of, top_case
)
from gather_gemm.launch import TopConfig
assert _triton._IS_INTERPRETED
del _ops.reference.gather_gemm  # the kernel must not need it
generator = torch.Generator().manual_seed(5)
kinds = ((torch.float32, 1e-6), (torch.float16, 1e-3))
for number, shape in enumerate(SHAPES[:5]):
    dtype, limit = kinds[number % 2]
    check_gather(generator, *shape, dtype, "cpu", limit)
reference = _ops.reference.gather_top
del _ops.reference.gather_top
tiles = [TopConfig(16, 64, 32, True, 4, 2), TopConfig(64, 64, 32, False, 4, 2)]
for number, shape in enumerate(TOP_SHAPES):
    dtype, config = kinds[number % 2][0], tiles[number // 2 % 2]
    x, rows, weight = top_case(generator, *shape, dtype, "cpu")
    for given, kind in ((rows, "none"), (None, "of all rows"), (rows, "by row")):
        if given is None and number > 1:
            continue  # so many rows take the interpreter long
        whole = x[:90] if given is None else x
        masks = masks_of(kind, generator, 90 if given is None else len(rows), shape[1], "cpu")
        found = gather_top(whole, given, weight, **masks, config=config)
        check_top(found, reference(whole, given, weight, **masks))
"""

GROUPED_GEMM = """
import torch
from gather_gemm import grouped
from tests.native.support import check_experts
from gather_gemm import _triton
assert _triton._IS_INTERPRETED
del grouped.reference  # the kernels must not need it
generator = torch.Generator().manual_seed(5)
for number, sizes in enumerate(([1, 0, 1], [0, 9, 0, 3, 5, 1], [70, 0, 30])):
    # read by pointers, and by the copy engine
    for width, depth in ((7, 5), (72, 136)):
        dtype = (torch.float32, torch.float16)[(number + (width == 72)) % 2]
        quantises = dtype == torch.float16 and sizes[-1] == 1  # widening costs the interpreter much
        check_experts(generator, sizes, 2, width, depth, dtype, "cpu", False, quantises)
"""

ROUTING = """
import torch
from gather_gemm import routing, routing_kernel
from tests.native.support import (
    DEPTHS, SCORINGS, SIZES, WINDOWED, awkward_logits, check_routing, check_rows, check_sums,
    check_windows, exact_rows, window_logits
)
routing.reference = None  # the kernels must not need it
generator = torch.Generator().manual_seed(5)
for num_rows, num_experts, num_chosen in ((33, 20, 3), (70, 40, 7)):
    for bias in (None, torch.randn(num_experts, generator=generator)):
        check_routing(torch.randn(num_rows, num_experts, generator=generator), num_chosen, bias)
# The rest in one block: a program for each expert takes the interpreter long.
routing_kernel._CHOICES = ((None, (16384, 4)),)
for number, (num_rows, num_experts, num_chosen) in enumerate(SIZES[:-3]):
    dtype = (torch.float32, torch.float16)[number % 2]
    logits = torch.randn(num_rows, num_experts, generator=generator).to(dtype)
    bias = torch.randn(num_experts, generator=generator)
    for given in (None, bias):
        check_routing(logits, num_chosen, given)
    depth = DEPTHS[number % len(DEPTHS)]
    check_rows(
        *exact_rows(generator, num_rows, num_experts, depth, torch.float16), num_chosen, bias
    )
for num_experts, num_chosen, scoring in SCORINGS:
    bias = torch.randint(0, 3, (num_experts,), generator=generator) / 4
    logits = awkward_logits(generator, 9, num_experts)
    if scoring.is_sigmoid:
        check_routing(logits, num_chosen, bias, scoring)
    check_routing(logits.exp2().clamp(max=2), num_chosen, None, scoring)
    check_routing(torch.randn(9, num_experts, generator=generator), num_chosen, bias, scoring)
    x, gate = exact_rows(generator, 9, num_experts, 256, torch.float16)
    check_rows(x, gate, num_chosen, bias, scoring)
for num_experts, num_chosen, scoring in WINDOWED:
    bias = torch.randint(0, 3, (num_experts,), generator=generator) / 4
    # many windows of many experts take the interpreter long
    for num_rows in {1, scoring.window - 1, scoring.window, 2 * scoring.window + 1} - {0, 65}:
        logits = window_logits(generator, num_rows, num_experts, scoring)
        check_windows(logits, num_chosen, bias, scoring)
        check_windows(logits.half(), num_chosen, None, scoring)
        x, gate = exact_rows(generator, num_rows, num_experts, 300, torch.float16)
        for in_parts in (False, True):
            check_rows(x, gate, num_chosen, bias, scoring, in_parts=in_parts)
for dtype in (torch.float32, torch.float16):
    for shape in ((1, 1, 1), (5, 3, 7), (3, 8, 1500)):
        check_sums(generator, shape, dtype, "cpu")
"""

LOW_RANK = """
import torch
from gather_gemm import low_rank
from tests.native.support import RANKS, RUNS, check_low_rank
from gather_gemm import _triton
assert _triton._IS_INTERPRETED
del low_rank.reference  # the kernels must not need it
generator = torch.Generator().manual_seed(5)
for number, runs in enumerate(RUNS):
    dtype = (torch.float32, torch.float16)[number % 2]
    check_low_rank(generator, runs, RANKS, dtype, "cpu", (16, 32, 64)[number], 1 << number)
# more than one block of ranks, and more than one step of the depth
ranks = [[70, 3, 0], [1, 2, 65]]
check_low_rank(generator, [(1, 5), (0, 20)], ranks, torch.float16, "cpu", 16, 2, depth=300)
"""

PROGRAMS = {
    "gather_gemm": GATHER_GEMM,
    "grouped_gemm": GROUPED_GEMM,
    "low_rank": LOW_RANK,
    "routing": ROUTING,
    "split_attention": "from tests.models.split_kernel import run_split as r; r()",
    "gemma": "import torch as t; from tests.models.gemma_rows import check_rows as r;"
    " r('cpu', t.float32, 1e-6)",
    "joint": "from tests.guided.joint_kernels import check; check('cpu', 0, 0.8, num_requests=1)",
}


@pytest.mark.skipif(not is_built(), reason="Triton is not installed")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_kernels_under_the_interpreter(program):
    run_interpreted(program)

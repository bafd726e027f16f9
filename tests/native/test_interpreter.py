# SPDX-License-Identifier: Apache-2.0
"""Triton kernels themselves on CPU tensors: one file, so that one process runs all programs."""

import pytest

from gather_gemm import is_built
from tests.interpreted import run_interpreted

GATHER_GEMM = """
import torch
from gather_gemm import _ops, _triton, gather_gemm, gather_top
from tests.native.support import SHAPES, TOP_SHAPES, masks_of
from gather_gemm.launch import TopConfig
assert _triton._IS_INTERPRETED
del _ops.reference.gather_gemm  # the kernel must not need it
generator = torch.Generator().manual_seed(5)
kinds = ((torch.float32, 1e-6), (torch.float16, 1e-3))
for number, (num_rows, num_columns, depth) in enumerate(SHAPES[:5]):
    dtype, limit = kinds[number % 2]
    x = torch.randn(90, depth + 5, generator=generator).to(dtype)[:, :depth]
    weight = torch.randn(num_columns, depth, generator=generator).to(dtype)
    rows = torch.randint(0, 90, (num_rows,), generator=generator)
    out = torch.full((num_rows, num_columns + 3), torch.nan, dtype=dtype)
    result = gather_gemm(x, rows, weight, out=out[:, :num_columns])
    wanted = x.double()[rows] @ weight.double().t()
    error = (result.double() - wanted).norm() / wanted.norm()
    assert error < limit, (dtype, num_rows, num_columns, depth, error)
    assert out[:, num_columns:].isnan().all()
    whole = gather_gemm(x.index_select(0, rows), None, weight)
    assert torch.equal(whole, result)
reference = _ops.reference.gather_top
del _ops.reference.gather_top
tiles = [TopConfig(16, 64, 32, True, 4, 2), TopConfig(64, 64, 32, False, 4, 2)]
for number, (num_rows, num_columns, depth) in enumerate(TOP_SHAPES):
    dtype, config = kinds[number % 2][0], tiles[number // 2 % 2]
    x = torch.randint(-2, 3, (90, depth + 8), generator=generator).to(dtype)[:, :depth]
    weight = torch.randint(-2, 3, (num_columns, depth), generator=generator).to(dtype) / 16
    rows = torch.randint(0, 90, (num_rows,), generator=generator)
    for given, kind in ((rows, "none"), (None, "of all rows"), (rows, "by row")):
        if given is None and number > 1:
            continue  # 90 rows take the interpreter long
        count = 90 if given is None else num_rows
        masks = masks_of(kind, generator, count, num_columns, "cpu")
        found = gather_top(x, given, weight, **masks, config=config)
        wanted = reference(x, given, weight, **masks)
        assert torch.equal(found.maximum, wanted[0])
        assert torch.equal(found.column, wanted[1])
        torch.testing.assert_close(found.sum_exp, wanted[2], rtol=1e-5, atol=0)
        torch.testing.assert_close(found.probability, wanted[3], rtol=1e-5, atol=0)
"""

GROUPED_GEMM = """
import torch
from gather_gemm import gated_gemm, grouped, weighted_gemm
from tests.native.support import (
    as_fp8, ends_of, gated_wanted, relative_error, weighted_wanted
)
from gather_gemm import _triton
assert _triton._IS_INTERPRETED
del grouped.reference  # the kernels must not need it
generator = torch.Generator().manual_seed(5)
kinds = ((torch.float32, 2e-6), (torch.float16, 1e-3))
for number, sizes in enumerate(([1, 0, 1], [0, 9, 0, 3, 5, 1], [70, 0, 30])):
    # read by pointers, and by the copy engine
    for width, depth in ((7, 5), (72, 136)):
        dtype, limit = kinds[(number + (width == 72)) % 2]
        case = (dtype, sizes, width, depth)
        num_slots, ends = sum(sizes), ends_of(sizes)
        slots = torch.randperm(num_slots, generator=generator).to(torch.int32)
        x = torch.randn(num_slots // 2, depth, generator=generator).to(dtype)
        w1 = torch.randn(len(sizes), 2 * width, depth, generator=generator).to(dtype)
        w1 /= depth**0.5
        w2 = torch.randn(len(sizes), depth, width, generator=generator).to(dtype)
        weights = torch.rand(num_slots // 2, 2, generator=generator).to(dtype)
        inner = gated_gemm(x, slots, 2, w1, ends)
        assert relative_error(inner, gated_wanted(x, slots, 2, w1, sizes)) < limit, case
        terms = weighted_gemm(inner, w2, ends, slots, weights)
        wanted = weighted_wanted(inner, w2, sizes, slots, weights)
        assert relative_error(terms, wanted) < limit, case
        if dtype == torch.float32 or sizes[-1] > 1:
            continue  # what widening fp8 costs the interpreter
        (w1, s1, m1), (w2, s2, m2) = as_fp8(w1), as_fp8(w2)
        inner = gated_gemm(x, slots, 2, w1, ends, s1)
        assert relative_error(inner, gated_wanted(x, slots, 2, m1, sizes)) < limit, case
        terms = weighted_gemm(inner, w2, ends, slots, weights, weight_scales=s2)
        wanted = weighted_wanted(inner, m2, sizes, slots, weights)
        assert relative_error(terms, wanted) < limit, case
"""

ROUTING = """
import torch
from gather_gemm import route, routing, routing_kernel, sum_terms
from gather_gemm import reference
from tests.native.support import (
    DEPTHS, SCORINGS, SIZES, awkward_logits, check_routing, check_rows, exact_rows
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
    for bias in (None, torch.randn(num_experts, generator=generator)):
        check_routing(logits, num_chosen, bias)
for dtype in (torch.float32, torch.float16):
    for shape in ((1, 1, 1), (5, 3, 7), (3, 8, 1500)):
        terms = torch.randn(*shape, generator=generator).to(dtype)
        x = torch.randn(shape[0], shape[2], generator=generator).to(dtype)
        wanted = reference.sum_terms(terms)
        assert torch.equal(sum_terms(terms), wanted)
        wanted += x
        sum_terms(terms, out=x, adds=True)
        assert torch.equal(x, wanted)
for num_experts, num_chosen, scoring in SCORINGS:
    bias = torch.randint(0, 3, (num_experts,), generator=generator) / 4
    logits = awkward_logits(generator, 9, num_experts)
    if scoring.is_sigmoid:
        check_routing(logits, num_chosen, bias, scoring)
    check_routing(logits.exp2().clamp(max=2), num_chosen, None, scoring)
    check_routing(torch.randn(9, num_experts, generator=generator), num_chosen, bias, scoring)
    x, gate = exact_rows(generator, 9, num_experts, 256, torch.float16)
    check_rows(x, gate, num_chosen, bias, scoring)
for shape in ((1, 1, 1), (5, 3, 7), (3, 8, 1500)):
    terms = torch.randint(-100, 101, shape, generator=generator).half()
    weights = torch.randint(1, 9, shape[:2], generator=generator) / 8
    addend = torch.randn(shape[0], shape[2], generator=generator).half()
    for some in (None, addend):
        assert torch.equal(
            sum_terms(terms, weights, some), reference.sum_terms(terms, weights, some)
        )
    assert torch.equal(sum_terms(terms, None, addend), reference.sum_terms(terms, None, addend))
    if shape[1] > 1:
        parts = terms[:, :-1], weights[:, :-1], terms[:, -1]
        assert torch.equal(sum_terms(*parts), reference.sum_terms(*parts))
for number, (num_rows, num_experts, num_chosen) in enumerate(SIZES[:-3]):
    depth = DEPTHS[number % len(DEPTHS)]
    x, gate = exact_rows(generator, num_rows, num_experts, depth, torch.float16)
    check_rows(x, gate, num_chosen, torch.randn(num_experts, generator=generator))
"""

PROGRAMS = {
    "gather_gemm": GATHER_GEMM,
    "grouped_gemm": GROUPED_GEMM,
    "routing": ROUTING,
    "split_attention": "from tests.models.split_kernel import run_split as r; r()",
    "joint": "from tests.guided.joint_kernels import check; check('cpu', 0, 0.8, num_requests=1)",
}


@pytest.mark.skipif(not is_built(), reason="Triton is not installed")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_kernels_under_the_interpreter(program):
    run_interpreted(program)

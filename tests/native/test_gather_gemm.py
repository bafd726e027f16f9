# SPDX-License-Identifier: Apache-2.0
"""gather_gemm: against float64, on a GPU and under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gather_gemm import (
    Epilogue,
    fused_linear,
    gather_gemm,
    gather_top,
    is_built,
    is_fused_linear_faster,
    is_top_faster,
)
from gather_gemm.launch import choose_config, choose_tiling, choose_top_config

ROOT = Path(__file__).resolve().parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Norm of the error over the norm of the result: fp32 sums, then one rounding to the dtype.
ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}

# One row, at and past the edges of every tile; columns and depth that fill no tile.
SHAPES = [(1, 1, 1), (16, 64, 64), (17, 131, 70), (33, 64, 200), (65, 129, 33), (300, 257, 130)]


def relative_error(x, rows, weight, out):
    wanted = x.double()[rows] @ weight.double().t()
    return ((out.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), SHAPES)
def test_against_float64(generator, device, dtype, num_rows, num_columns, depth):
    x = torch.randn(90, depth + 5, generator=generator).to(dtype).to(device)[:, :depth]
    weight = torch.randn(num_columns, depth, generator=generator).to(dtype).to(device)
    rows = torch.randint(0, 90, (num_rows,), generator=generator).to(device)
    out = torch.full((num_rows, num_columns + 3), torch.nan, dtype=dtype, device=device)
    result = gather_gemm(x, rows, weight, out=out[:, :num_columns])
    assert relative_error(x, rows, weight, result) < ERROR[dtype]
    assert out[:, num_columns:].isnan().all()
    assert torch.equal(gather_gemm(x, rows, weight), result)


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    x, weight = torch.ones(4, 8, device=device), torch.ones(5, 8, device=device)
    assert gather_gemm(x, torch.empty(0, dtype=torch.int64, device=device), weight).shape == (0, 5)


@pytest.mark.skipif(not is_built(), reason="Triton is not installed")
def test_kernel_under_the_interpreter():
    """The kernel itself on CPU tensors; a process of its own, since Triton decides at import."""
    program = f"""
import torch
from gather_gemm import _ops, gather_gemm, gather_top
from gather_gemm.launch import TopConfig
assert _ops._is_interpreted()
del _ops.reference.gather_gemm  # the kernel must not need it
generator = torch.Generator().manual_seed(5)
for dtype, limit in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
    for num_rows, num_columns, depth in {SHAPES[:5]}:
        x = torch.randn(90, depth + 5, generator=generator).to(dtype)[:, :depth]
        weight = torch.randn(num_columns, depth, generator=generator).to(dtype)
        rows = torch.randint(0, 90, (num_rows,), generator=generator)
        out = torch.full((num_rows, num_columns + 3), torch.nan, dtype=dtype)
        result = gather_gemm(x, rows, weight, out=out[:, :num_columns])
        wanted = x.double()[rows] @ weight.double().t()
        error = (result.double() - wanted).norm() / wanted.norm()
        assert error < limit, (dtype, num_rows, num_columns, depth, error)
        assert out[:, num_columns:].isnan().all()
reference = _ops.reference.gather_top
del _ops.reference.gather_top
tiles = [TopConfig(16, 64, 32, True, 4, 2), TopConfig(64, 64, 32, False, 4, 2)]
for dtype in (torch.float32, torch.float16):
    for num_rows, num_columns, depth in {TOP_SHAPES}:
        x = torch.randint(-2, 3, (90, depth + 8), generator=generator).to(dtype)[:, :depth]
        weight = torch.randint(-2, 3, (num_columns, depth), generator=generator).to(dtype) / 16
        rows = torch.randint(0, 90, (num_rows,), generator=generator)
        for config in tiles:
            for given, excluded in ((rows, ()), (None, (3, 39))):
                found = gather_top(x, given, weight, excluded=excluded, config=config)
                wanted = reference(x, given, weight, excluded)
                assert torch.equal(found.maximum, wanted[0])
                assert torch.equal(found.column, wanted[1])
                torch.testing.assert_close(found.sum_exp, wanted[2], rtol=1e-5, atol=0)
                torch.testing.assert_close(found.probability, wanted[3], rtol=1e-5, atol=0)
"""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
    }
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_tiles_fit_the_shared_memory_of_every_target(element_bytes):
    for num_rows in (1, 16, 17, 32, 33, 64, 65, 8192):
        config = choose_config(num_rows, element_bytes)
        sides = config.block_rows + config.block_columns
        assert sides * config.block_depth * element_bytes * config.num_stages <= 99 * 1024
        assert config.block_rows >= 16 and config.block_depth >= 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4)}, "x must be"),
        ({"x": torch.zeros(4, 8, dtype=torch.int64)}, "x must be"),
        ({"x": torch.zeros(8, 4).t()}, "columns of x must be contiguous"),
        ({"weight": torch.zeros(5, 7)}, r"weight must be \['any', 8\]"),
        ({"weight": torch.zeros(5, 8).half()}, "got torch.float16"),
        ({"rows": torch.zeros(3)}, r"rows must be int64 \[R\]"),
        ({"out": torch.zeros(3, 6)}, r"out must be \[3, 5\]"),
    ],
)
def test_arguments_are_checked(changes, message):
    arguments = {
        "x": torch.zeros(4, 8),
        "rows": torch.zeros(3, dtype=torch.int64),
        "weight": torch.zeros(5, 8),
    }
    with pytest.raises(ValueError, match=message):
        gather_gemm(**(arguments | changes))


def softmax_of(logits, excluded):
    """Maximum, lowest column, sum of exp and probability of the best column, in float64."""
    logits = logits.double()
    maximum = logits.amax(dim=-1)
    column = (logits == maximum[:, None]).int().argmax(dim=-1)
    kept = logits.clone()
    kept[:, list(excluded)] = -torch.inf
    sums = (kept - maximum.masked_fill(maximum == -torch.inf, 0)[:, None]).exp().sum(dim=-1)
    chosen = (1 / sums).masked_fill(maximum == -torch.inf, 0)
    for excluded_column in excluded:
        chosen = chosen.masked_fill(column == excluded_column, 0)
    return maximum, column, sums, chosen


def integers(generator, *shape):
    """Small whole numbers: their products are exact, so logits have ties and none is rounded."""
    return torch.randint(-2, 3, shape, generator=generator)


# Rows: one, at and past the edges of the tiles. Columns and depth: no multiples of any tile.
TOP_SHAPES = [(1, 40, 64), (16, 256, 128), (17, 131, 72), (33, 300, 200), (70, 257, 136)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize(("num_rows", "num_columns", "depth"), [*TOP_SHAPES, (150, 1000, 264)])
@pytest.mark.parametrize("excluded", [(), (3, 39)])
def test_top_against_float64(generator, device, dtype, num_rows, num_columns, depth, excluded):
    x = integers(generator, 160, depth + 8).to(device, dtype)[:, :depth]
    weight = integers(generator, num_columns, depth).to(device, dtype) / 16
    rows = torch.randint(0, 160, (num_rows,), generator=generator).to(device)
    logits = (x.double() @ weight.double().t()).to(dtype)
    for given in (rows, None):
        top = gather_top(x, given, weight, excluded=excluded)
        wanted = softmax_of(logits if given is None else logits[rows], excluded)
        assert torch.equal(top.maximum.double(), wanted[0])
        assert torch.equal(top.column, wanted[1])
        torch.testing.assert_close(top.sum_exp.double(), wanted[2], rtol=1e-5, atol=0)
        torch.testing.assert_close(top.probability.double(), wanted[3], rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_top_of_rows_that_say_nothing(device):
    x = torch.ones(4, 64, device=device, dtype=torch.bfloat16)
    x[1] = torch.nan
    weight = torch.full((300, 64), -torch.inf, device=device, dtype=torch.bfloat16)
    top = gather_top(x, None, weight)
    assert top.column[0] == 0 and top.sum_exp[0] == 0 and top.probability[0] == 0
    assert top.sum_exp[1].isnan() and top.probability[1].isnan() and 0 <= top.column[1] < 300
    assert gather_top(x[:0], None, weight).column.shape == (0,)


@pytest.mark.gpu
def test_rows_of_a_top_do_not_depend_on_each_other(generator):
    """Alone, and in a batch that takes the same tile."""
    x = torch.randn(32, 512, generator=generator).to("cuda", torch.bfloat16)
    weight = torch.randn(1000, 512, generator=generator).to("cuda", torch.bfloat16)
    whole = gather_top(x, None, weight)
    some = gather_top(x, torch.arange(31, 10, -1, device="cuda"), weight)
    for of_whole, of_some in zip(whole, some, strict=True):
        assert torch.equal(of_whole[11:].flip(0), of_some)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4)}, "gather_top: x must be"),
        ({"weight": torch.zeros(5, 7)}, r"weight must be \['any', 8\]"),
        ({"weight": torch.zeros(0, 8)}, "at least one row"),
        ({"rows": torch.zeros(3)}, r"rows must be int64 \[R\]"),
        ({"excluded": [5]}, r"excluded must be at most 16 columns in \[0, 5\)"),
        ({"excluded": [0] * 17}, "excluded must be at most 16 columns"),
    ],
)
def test_arguments_of_top_are_checked(changes, message):
    arguments = {"x": torch.zeros(4, 8), "rows": None, "weight": torch.zeros(5, 8)}
    with pytest.raises(ValueError, match=message):
        gather_top(**(arguments | changes))


def test_choices_by_the_number_of_rows():
    assert [choose_top_config(rows).block_rows for rows in (1, 16, 17, 64, 128)] == [
        16,
        16,
        32,
        64,
        128,
    ]
    assert choose_top_config(129) is None
    for rows in (1, 17, 33, 65):
        config = choose_top_config(rows)
        sides = config.block_rows + config.block_columns
        assert sides * config.block_depth * 2 * config.num_stages <= 226 * 1024
    assert not is_top_faster(torch.zeros(4, 8), 4, torch.zeros(5, 8))


# Columns and depth that have a tiling on a card of 132 multiprocessors, and whether gated.
SKINNY = [(12288, 256, False), (4096, 384, False), (6144, 128, False), (2048, 256, False)]
SKINNY_ROWS = [1, 7, 16, 33, 64, 65, 100, 128, 150, 192]


def test_tilings_give_each_multiprocessor_one_block():
    for columns, depth, gated in [*SKINNY, (24576, 256, True), (3584, 18944, False)]:
        tiling = choose_tiling(32, columns, depth, gated=gated, multiprocessors=132)
        assert 110 <= columns // tiling.columns * tiling.split <= 132
        assert columns % tiling.columns == 0 and depth % (64 * tiling.split) == 0
    assert choose_tiling(32, 4096, 4096, gated=False, multiprocessors=0) is None
    for num_rows, is_chosen in ((128, True), (129, False), (144, True), (192, True), (193, False)):
        tiling = choose_tiling(num_rows, 4096, 4096, gated=False, multiprocessors=132)
        assert (tiling is not None) == is_chosen
    assert choose_tiling(0, 4096, 4096, gated=False, multiprocessors=132) is None
    assert choose_tiling(32, 4096, 4096 + 64, gated=False, multiprocessors=132) is None
    assert choose_tiling(32, 24576, 4096, gated=False, multiprocessors=132) is None


# Rows for which a card of 132 multiprocessors has little left over in the last of its tiles.
GATED = [(250, 24576), (384, 24576), (505, 24576), (1000, 24576), (512, 37888)]


def test_tilings_of_many_rows_leave_little_of_the_card_idle():
    chosen = [choose_tiling(*case, 256, gated=True, multiprocessors=132).rows for case in GATED]
    assert chosen == [256, 128, 256, 256, 256]
    for num_rows in (0, 129, 192, 300, 448):
        assert choose_tiling(num_rows, 24576, 256, gated=True, multiprocessors=132) is None
    assert choose_tiling(256, 24576, 256, gated=True, multiprocessors=0) is None
    assert choose_tiling(256, 24576, 256 + 8, gated=True, multiprocessors=132) is None
    assert choose_tiling(256, 24576, 256, gated=False, multiprocessors=132) is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", SKINNY_ROWS)
@pytest.mark.parametrize(("num_columns", "depth", "gated"), SKINNY)
@pytest.mark.parametrize("early", [False, True])
def test_fused_linear_against_float64(generator, num_rows, num_columns, depth, gated, early):
    wide = torch.randn(max(SKINNY_ROWS), depth + 8, generator=generator).to("cuda", torch.bfloat16)
    x = wide[:num_rows, :depth]
    weight = torch.randn(num_columns, depth, generator=generator).to("cuda", torch.bfloat16)
    bias = torch.randn(num_columns, generator=generator).to("cuda", torch.bfloat16)
    torch.cuda.synchronize()  # the kernel may read the weight before the one that writes it ends
    wanted = x.double() @ weight.double().t()
    torch.cuda.synchronize()
    room = torch.full((num_rows + 1, num_columns + 8), torch.nan, device="cuda").bfloat16()
    out = room[:num_rows, :num_columns]
    assert fused_linear(x, weight, out, early=early) is out
    assert (out.double() - wanted).norm() <= ERROR[torch.bfloat16] * wanted.norm()
    assert room[num_rows:].isnan().all() and room[:, num_columns:].isnan().all()
    biased = fused_linear(x, weight, bias=bias, early=early).double()
    assert (biased - wanted - bias).norm() <= ERROR[torch.bfloat16] * wanted.norm()
    before = torch.randn(num_rows, num_columns, generator=generator).to("cuda", torch.bfloat16)
    after = before.clone()
    fused_linear(x, weight, after, epilogue=Epilogue.RESIDUAL, early=early)
    total = before.double() + wanted
    assert (after.double() - total).norm() <= ERROR[torch.bfloat16] * total.norm()
    if is_fused_linear_faster(x, weight):  # the same bits whatever the number of rows
        assert torch.equal(fused_linear(x[: (num_rows + 1) // 2], weight), out[: len(x[::2])])


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_columns"), [*((rows, 24576) for rows in SKINNY_ROWS if rows <= 128), *GATED]
)
def test_gated_linear_rounds_as_its_parts(generator, num_rows, num_columns, early):
    x = torch.randn(num_rows, 264, generator=generator).to("cuda", torch.bfloat16)[:, :256]
    weight = torch.randn(num_columns, 256, generator=generator).to("cuda", torch.bfloat16) / 16
    if torch.cuda.get_device_capability() == (9, 0):
        assert is_fused_linear_faster(x, weight, Epilogue.SILU_MUL)
    gate, up = (x.double() @ weight.double().t()).bfloat16().chunk(2, dim=-1)
    wanted = (torch.nn.functional.silu(gate) * up).double()
    width = num_columns // 2
    room = torch.full((num_rows + 1, width + 8), torch.nan, device="cuda").bfloat16()
    out = room[:num_rows, :width]
    torch.cuda.synchronize()  # the kernel may read the weight before the one that writes it ends
    assert fused_linear(x, weight, out, epilogue=Epilogue.SILU_MUL, early=early) is out
    assert (out.double() - wanted).norm() <= 1e-3 * wanted.norm()  # a sum now and then rounds away
    assert room[num_rows:].isnan().all() and room[:, width:].isnan().all()
    crooked = torch.empty(num_rows, width + 3, device="cuda").bfloat16()[:, :width]
    fused_linear(x, weight, crooked, epilogue=Epilogue.SILU_MUL)
    assert (crooked.double() - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.gpu
def test_fused_linear_in_a_captured_graph(generator):
    """A chain of products, each started early, replayed over changed rows."""
    x = torch.randn(32, 4096, generator=generator).to("cuda", torch.bfloat16)
    weights = torch.randn(2, 4096, 4096, generator=generator).to("cuda", torch.bfloat16) / 64
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = fused_linear(x, weights[0], early=True)
        second = fused_linear(first, weights[1], early=True)
    for _ in range(5):
        x.normal_()
        graph.replay()
        assert torch.equal(second, fused_linear(fused_linear(x, weights[0]), weights[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_linear_on_the_cpu_is_pytorch(generator, dtype):
    x = torch.randn(5, 24, generator=generator).to(dtype)
    weight = torch.randn(16, 24, generator=generator).to(dtype)
    bias, out = torch.randn(16, generator=generator).to(dtype), torch.zeros(5, 16, dtype=dtype)
    assert not is_fused_linear_faster(x, weight)
    assert torch.equal(fused_linear(x, weight), x @ weight.t())
    assert torch.equal(fused_linear(x, weight, bias=bias), torch.addmm(bias, x, weight.t()))
    assert fused_linear(x, weight, out, epilogue=Epilogue.RESIDUAL) is out
    torch.testing.assert_close(out, x @ weight.t())
    gate, up = (x @ weight.t()).chunk(2, dim=-1)
    gated = fused_linear(x, weight, epilogue=Epilogue.SILU_MUL)
    assert torch.equal(gated, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4)}, "fused_linear: x must be"),
        ({"weight": torch.zeros(6, 7)}, r"weight must be \['any', 8\]"),
        ({"weight": torch.zeros(6, 8).half()}, "got torch.float16"),
        ({"bias": torch.zeros(5)}, r"bias must be \[6\]"),
        ({"out": torch.zeros(4, 5)}, r"out must be \[4, 6\]"),
        ({"epilogue": Epilogue.RESIDUAL}, "RESIDUAL adds to out"),
        ({"epilogue": Epilogue.SILU_MUL, "weight": torch.zeros(5, 8)}, "two equal halves"),
        ({"epilogue": Epilogue.SILU_MUL, "bias": torch.zeros(6)}, "no bias"),
        ({"epilogue": Epilogue.SILU_MUL, "out": torch.zeros(4, 6)}, r"out must be \[4, 3\]"),
    ],
)
def test_arguments_of_fused_linear_are_checked(changes, message):
    arguments = {"x": torch.zeros(4, 8), "weight": torch.zeros(6, 8)}
    with pytest.raises(ValueError, match=message):
        fused_linear(**(arguments | changes))

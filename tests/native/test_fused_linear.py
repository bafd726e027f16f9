# SPDX-License-Identifier: Apache-2.0
"""fused_ops.fused_linear matches float64 with every tiling."""

import pytest
import torch

from vllm_add_llada.cuda_kernels.fused_ops import (
    Epilogue,
    Tiling,
    fused_linear,
    has_fused_linear,
)

ERROR = 6e-3  # norm of the error over that of the result: fp32 sums, then one rounding to bf16

# Every tiling for few rows: a number of columns and a depth that it divides, and its maximum rows.
SKINNY = [
    (Tiling(96), 12288, 256, 64),
    (Tiling(64, split=2), 4096, 384, 192),
    (Tiling(96, split=2), 6144, 128, 128),
    (Tiling(32, split=2), 2048, 256, 64),
    (Tiling(32, split=4), 1024, 512, 64),
]
SKINNY_ROWS = [1, 7, 16, 33, 64, 65, 100, 128, 150, 192]
SKINNY_CASES = [(rows, *case) for *case, most in SKINNY for rows in SKINNY_ROWS if rows <= most]

# Rows and columns of gated products in tiles of many rows, some of which are partly filled.
GATED = [(250, 24576), (384, 24576), (505, 24576), (1000, 24576), (512, 37888)]
GATED_CASES = [
    *((Tiling(192), rows, 24576) for rows in SKINNY_ROWS if rows <= 128),
    *((Tiling(96), rows, 12288) for rows in SKINNY_ROWS if rows <= 64),
    *((Tiling(48), rows, 6144) for rows in SKINNY_ROWS if rows <= 64),
    *((Tiling(192, rows=rows), *case) for rows in (128, 256) for case in GATED),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "tiling", "num_columns", "depth"), SKINNY_CASES)
@pytest.mark.parametrize("early", [False, True])
def test_fused_linear_against_float64(generator, num_rows, tiling, num_columns, depth, early):
    options = {"tiling": tiling, "early": early}
    wide = torch.randn(max(SKINNY_ROWS), depth + 8, generator=generator).to("cuda", torch.bfloat16)
    x = wide[:num_rows, :depth]
    weight = torch.randn(num_columns, depth, generator=generator).to("cuda", torch.bfloat16)
    bias = torch.randn(num_columns, generator=generator).to("cuda", torch.bfloat16)
    torch.cuda.synchronize()  # the kernel may read the weight before its writer has ended
    wanted = x.double() @ weight.double().t()
    torch.cuda.synchronize()
    room = torch.full((num_rows + 1, num_columns + 8), torch.nan, device="cuda").bfloat16()
    out = room[:num_rows, :num_columns]
    assert fused_linear(x, weight, out, **options) is out
    assert (out.double() - wanted).norm() <= ERROR * wanted.norm()
    assert room[num_rows:].isnan().all() and room[:, num_columns:].isnan().all()
    biased = fused_linear(x, weight, bias=bias, **options).double()
    assert (biased - wanted - bias).norm() <= ERROR * wanted.norm()
    before = torch.randn(num_rows, num_columns, generator=generator).to("cuda", torch.bfloat16)
    after = before.clone()
    fused_linear(x, weight, after, epilogue=Epilogue.RESIDUAL, **options)
    total = before.double() + wanted
    assert (after.double() - total).norm() <= ERROR * total.norm()
    # The bits of a row do not depend on the number of rows.
    if has_fused_linear(x, weight):
        fewer = fused_linear(x[: (num_rows + 1) // 2], weight, **options)
        assert torch.equal(fewer, out[: len(fewer)])


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("tiling", "num_rows", "num_columns"), GATED_CASES)
def test_gated_linear_rounds_as_its_parts(generator, tiling, num_rows, num_columns, early):
    options = {"tiling": tiling, "epilogue": Epilogue.SILU_MUL}
    x = torch.randn(num_rows, 264, generator=generator).to("cuda", torch.bfloat16)[:, :256]
    weight = torch.randn(num_columns, 256, generator=generator).to("cuda", torch.bfloat16) / 16
    if torch.cuda.get_device_capability() == (9, 0):
        assert has_fused_linear(x, weight)
    gate, up = (x.double() @ weight.double().t()).bfloat16().chunk(2, dim=-1)
    wanted = (torch.nn.functional.silu(gate) * up).double()
    width = num_columns // 2
    room = torch.full((num_rows + 1, width + 8), torch.nan, device="cuda").bfloat16()
    out = room[:num_rows, :width]
    torch.cuda.synchronize()  # the kernel may read the weight before its writer has ended
    assert fused_linear(x, weight, out, early=early, **options) is out
    assert (out.double() - wanted).norm() <= 1e-3 * wanted.norm()  # some sums round differently
    assert room[num_rows:].isnan().all() and room[:, width:].isnan().all()
    crooked = torch.empty(num_rows, width + 3, device="cuda").bfloat16()[:, :width]
    fused_linear(x, weight, crooked, **options)
    assert (crooked.double() - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("tail_depth", [8, 64, 72, 256])
@pytest.mark.parametrize("tile_rows", [128, 256])
@pytest.mark.parametrize("num_rows", [1, 63, 128, 250, 505])
def test_a_tail_is_added_before_rounding(generator, tail_depth, tile_rows, num_rows):
    """The product of strided rows and of another weight belongs to the same sums."""
    columns, depth = 24576, 256
    wide = torch.randn(num_rows, depth + tail_depth + 24, generator=generator)
    wide = wide.to("cuda", torch.bfloat16)
    x, rows = wide[:, :depth], wide[:, depth + 8 : depth + 8 + tail_depth]
    weight = torch.randn(columns, depth, generator=generator).to("cuda", torch.bfloat16) / 16
    other = torch.randn(columns, tail_depth + 8, generator=generator).to("cuda", torch.bfloat16)
    other = other[:, :tail_depth] / 16
    torch.cuda.synchronize()  # the kernel may read the weights before their writers have ended
    total = x.double() @ weight.double().t() + rows.double() @ other.double().t()
    gate, up = total.bfloat16().chunk(2, dim=-1)
    wanted = (torch.nn.functional.silu(gate) * up).double()
    room = torch.full((num_rows + 1, columns // 2 + 8), torch.nan, device="cuda").bfloat16()
    out = room[:num_rows, : columns // 2]
    options = {"epilogue": Epilogue.SILU_MUL, "early": True, "tail": (rows, other)}
    fused_linear(x, weight, out, tiling=Tiling(192, rows=tile_rows), **options)
    assert (out.double() - wanted).norm() <= 1e-3 * wanted.norm()  # some sums round differently
    assert room[num_rows:].isnan().all() and room[:, columns // 2 :].isnan().all()
    if has_fused_linear(x, weight):
        with pytest.raises(RuntimeError, match=r"fused_ops\.linear: cudaErrorInvalidValue"):
            fused_linear(x, weight, out, tiling=Tiling(192), **options)


@pytest.mark.gpu
@pytest.mark.parametrize(("tiling", "epilogue"), [(Tiling(80), "STORE"), (Tiling(64), "SILU_MUL")])
def test_a_tiling_without_a_kernel_is_refused(tiling, epilogue):
    x = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(960, 64, device="cuda", dtype=torch.bfloat16)
    if not has_fused_linear(x, weight):
        pytest.skip("needs a card of compute capability 9.0")
    with pytest.raises(RuntimeError, match=r"fused_ops\.linear: cudaErrorInvalidValue"):
        fused_linear(x, weight, tiling=tiling, epilogue=Epilogue[epilogue])


@pytest.mark.gpu
def test_fused_linear_in_a_captured_graph(generator):
    """A chain of products, each started early, is replayed with changed rows."""
    tiling = Tiling(64, split=2)
    x = torch.randn(32, 4096, generator=generator).to("cuda", torch.bfloat16)
    weights = torch.randn(2, 4096, 4096, generator=generator).to("cuda", torch.bfloat16) / 64
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = fused_linear(x, weights[0], tiling=tiling, early=True)
        second = fused_linear(first, weights[1], tiling=tiling, early=True)
    for _ in range(5):
        x.normal_()
        graph.replay()
        first = fused_linear(x, weights[0], tiling=tiling)
        assert torch.equal(second, fused_linear(first, weights[1], tiling=tiling))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_linear_on_the_cpu_is_pytorch(generator, dtype):
    x = torch.randn(5, 24, generator=generator).to(dtype)
    weight = torch.randn(16, 24, generator=generator).to(dtype)
    bias, out = torch.randn(16, generator=generator).to(dtype), torch.zeros(5, 16, dtype=dtype)
    assert not has_fused_linear(x, weight)
    assert torch.equal(fused_linear(x, weight, tiling=Tiling(96)), x @ weight.t())
    assert torch.equal(fused_linear(x, weight, bias=bias), torch.addmm(bias, x, weight.t()))
    assert fused_linear(x, weight, out, epilogue=Epilogue.RESIDUAL) is out
    torch.testing.assert_close(out, x @ weight.t())
    gate, up = (x @ weight.t()).chunk(2, dim=-1)
    gated = fused_linear(x, weight, epilogue=Epilogue.SILU_MUL)
    assert torch.equal(gated, torch.nn.functional.silu(gate) * up)
    tail = x[:, :8], weight[:, 8:16]
    longer = torch.cat([x, tail[0]], dim=1) @ torch.cat([weight, tail[1]], dim=1).t()
    assert torch.equal(fused_linear(x, weight, tail=tail), longer)


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


@pytest.mark.gpu
@pytest.mark.parametrize("width", [12_288, 768])
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_gated_tilings_have_one_order(generator, width, scale):
    x = torch.randn(300, 4096, generator=generator).to("cuda", torch.bfloat16)
    weight = torch.randn(2 * width, 4096, generator=generator).to("cuda", torch.bfloat16) * scale
    tilings = [Tiling(192, rows=128), Tiling(192, rows=256), Tiling(192), Tiling(96)]
    options = {"epilogue": Epilogue.SILU_MUL}
    wanted = fused_linear(x, weight, tiling=tilings[0], **options)
    for tiling, most in zip(tilings, (300, 300, 128, 64), strict=True):
        found = fused_linear(x[:most], weight, tiling=tiling, **options)
        assert torch.equal(found.view(torch.int16), wanted[:most].view(torch.int16))

# SPDX-License-Identifier: Apache-2.0
"""fp8 rows and their products match float64, and kernels match the references."""

import pytest
import torch
from torch.nn import functional

from vllm_add_llada.cuda_kernels.fused_ops import (
    FP8,
    Epilogue,
    Fp8Heads,
    QuantisedRows,
    Tiling,
    add_linear_fp8,
    apply_rotary,
    fused_linear_fp8,
    has_add_linear_fp8,
    has_quantise,
    quantise_rows,
    rescale,
    rms_norm_quantised,
    silu_mul_quantised,
)

DEVICES = [
    ("cpu", torch.float32),
    ("cpu", torch.bfloat16),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]
ERROR = 8e-3  # norm of the error over that of the result: sums of the tensor cores, bf16
STEP = 2**-4  # half a step of e4m3 with its three bits, relative to the number
ONES, WEIGHT = torch.ones(16), torch.zeros(16, 16).to(FP8)
TINY = 2**-10  # half a step of numbers below 2^-6, relative to the largest number over 448


def empty_rows(num_rows, width, device, fixed=None):
    values = torch.zeros(num_rows, width, device=device).to(FP8)
    scales = torch.full((num_rows,), torch.nan, device=device)
    return QuantisedRows(values, scales, fixed)


def meant(rows):
    return rows.values.double() * rows.scales.double()[:, None]


def assert_close_to(rows, wanted, rounding=0.0):
    """Check that numbers are within half a step of the format and the input's rounding."""
    wanted = wanted.double()
    largest = wanted.abs().amax(dim=1, keepdim=True)
    room = (STEP + rounding) * wanted.abs() + TINY * 1.01 * largest / 448 + 1e-33
    assert ((meant(rows) - wanted).abs() <= room).all()


def numbers(generator, *shape, device="cpu", dtype=torch.float32):
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 16), (7, 4096), (33, 12288), (3, 18944)])
def test_rows_against_float64(generator, device, dtype, num_rows, width):
    wide = numbers(generator, num_rows, width + 16, device=device, dtype=dtype)
    x = wide[:, :width]
    x *= torch.logspace(-20, 20, num_rows, device=device)[:, None].to(dtype)
    x[-1] = 0
    out = empty_rows(num_rows, width, device)
    quantise_rows(x, out)
    assert_close_to(out, x)
    assert (out.values[-1].float() == 0).all()
    if num_rows > 1:
        largest = x[:-1].abs().amax(dim=1).float()
        torch.testing.assert_close(out.scales[:-1], largest / 448, rtol=1e-6, atol=0)
        assert (out.values[:-1].float().abs().amax(dim=1) == 448).all()


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_a_fixed_scale_holds_for_all_rows_and_cuts_what_is_beyond(generator, device, dtype):
    x = numbers(generator, 5, 64, device=device, dtype=dtype)
    x[2] *= 100
    out = empty_rows(5, 64, device, torch.tensor([0.01], device=device))
    quantise_rows(x, out)
    assert (out.scales == out.fixed_scale).all()
    bounded = x.double().clamp(-4.48, 4.48)
    assert ((meant(out) - bounded).abs() <= STEP * bounded.abs() + 0.01 * TINY).all()


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize(
    ("num_rows", "width"), [(1, 16), (9, 2048), (33, 8192), (5, 40000), (601, 1280)]
)
def test_norm_and_gate_against_float64(generator, device, dtype, num_rows, width):
    x = numbers(generator, num_rows, width, device=device, dtype=dtype)
    gain = numbers(generator, width, device=device, dtype=dtype)
    out = empty_rows(num_rows, width, device)
    rms_norm_quantised(x, gain, 1e-5, out)
    wide = x.double()
    wanted = wide * torch.rsqrt(wide.pow(2).mean(dim=1, keepdim=True) + 1e-5) * gain.double()
    assert_close_to(out, wanted, rounding=0.02)
    gate_up = numbers(generator, num_rows, 2 * width, device=device, dtype=dtype)
    silu_mul_quantised(gate_up, out)
    gate, up = gate_up.double().chunk(2, dim=1)
    assert_close_to(out, functional.silu(gate) * up, rounding=0.03)
    row_scales = torch.rand(num_rows, generator=generator).to(device)
    column_scales = torch.rand(2 * width, generator=generator).to(device)
    silu_mul_quantised(gate_up, out, row_scales, column_scales)
    gate, up = (gate_up.double() * row_scales[:, None] * column_scales).chunk(2, dim=1)
    assert_close_to(out, functional.silu(gate) * up, rounding=0.03)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_gets_its_scales(generator, device, dtype, adds, has_bias):
    product = 1e4 * numbers(generator, 6, 48, device=device, dtype=dtype)
    row_scales = torch.rand(6, generator=generator).to(device)
    column_scales = 1e-4 * torch.rand(48, generator=generator).to(device)
    bias = numbers(generator, 48, device=device, dtype=dtype) if has_bias else None
    out = numbers(generator, 6, 48, device=device, dtype=dtype)
    wanted = product.double() * row_scales[:, None] * column_scales
    wanted = wanted + (bias.double() if has_bias else 0) + (out.double() if adds else 0)
    rescale(product, row_scales, column_scales, out, bias=bias, adds=adds)
    torch.testing.assert_close(out, wanted.to(dtype))


def product_case(generator, num_rows, num_columns, depth, device, dtype):
    x = empty_rows(num_rows, depth, device)
    quantise_rows(numbers(generator, num_rows, depth, device=device, dtype=dtype), x)
    weight = empty_rows(num_columns, depth, device)
    quantise_rows(numbers(generator, num_columns, depth, device=device) / depth**0.5, weight)
    return x, weight, meant(x) @ meant(weight).t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_on_the_cpu_against_float64(generator, dtype):
    x, weight, wanted = product_case(generator, 5, 32, 48, "cpu", dtype)
    out = torch.empty(5, 32, dtype=dtype)
    bias = numbers(generator, 32, dtype=dtype)
    fused_linear_fp8(x, weight.values, weight.scales, out, bias=bias)
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 0.01, "atol": 1e-5}
    torch.testing.assert_close(out.double(), wanted + bias.double(), **tolerance)
    before = out.clone()
    residual = {"epilogue": Epilogue.RESIDUAL}
    fused_linear_fp8(x, weight.values, weight.scales, out, **residual)
    torch.testing.assert_close(out.double(), before.double() + wanted, rtol=0.02, atol=1e-5)
    gated = torch.empty(5, 16, dtype=dtype)
    fused_linear_fp8(x, weight.values, weight.scales, gated, epilogue=Epilogue.SILU_MUL)
    gate, up = wanted.chunk(2, dim=1)
    torch.testing.assert_close(gated.double(), functional.silu(gate) * up, rtol=0.03, atol=1e-3)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("num_rows", [1, 40, 1024, 1500])
def test_many_rows_are_added(generator, device, dtype, num_rows):
    x, (weight, scales, _), wanted = product_case(generator, num_rows, 256, 384, device, dtype)
    before = numbers(generator, num_rows, 256, device=device, dtype=dtype)
    out = before.clone()
    assert has_add_linear_fp8(x, weight, scales, out) == (device == "cuda")
    add_linear_fp8(x, weight, scales, out)
    wanted = before.double() + wanted
    assert (out.double() - wanted).norm() <= ERROR * wanted.norm()
    part = x.values[:, 128:].contiguous()  # some features, as in a head group
    out = before.clone()
    add_linear_fp8(x._replace(values=part), weight[:, 128:], scales, out)
    wanted = before.double() + meant(x)[:, 128:] @ (weight[:, 128:].double() * scales[:, None]).t()
    assert (out.double() - wanted).norm() <= ERROR * wanted.norm()


FEW = [1, 7, 33, 64]
SKINNY = [
    (Tiling(96), 12288, 256, [*FEW, 150, 192, 200, 256]),
    (Tiling(64, split=2), 4096, 768, [*FEW, 65, 128, 150, 192, 200, 256]),
    (Tiling(96, split=2), 6144, 256, FEW),
    (Tiling(32, split=2), 2048, 512, FEW),
]
SKINNY_CASES = [(rows, *case) for *case, all_rows in SKINNY for rows in all_rows]


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "tiling", "num_columns", "depth"), SKINNY_CASES)
@pytest.mark.parametrize("early", [False, True])
def test_few_rows_against_float64(generator, num_rows, tiling, num_columns, depth, early):
    ahead = torch.empty(100_000, device="cuda") if early else None
    options = {"tiling": tiling, "early": early, "ahead": ahead}
    case = product_case(generator, num_rows, num_columns, depth, "cuda", torch.bfloat16)
    x, (weight, scales, _), wanted = case
    bias = numbers(generator, num_columns, device="cuda", dtype=torch.bfloat16)
    room = torch.full((num_rows + 1, num_columns + 8), torch.nan, device="cuda").bfloat16()
    out = room[:num_rows, :num_columns]
    torch.cuda.synchronize()  # the kernel may read the weight before its writer has ended
    fused_linear_fp8(x, weight, scales, out, **options)
    assert (out.double() - wanted).norm() <= ERROR * wanted.norm()
    assert room[num_rows:].isnan().all() and room[:, num_columns:].isnan().all()
    after = numbers(generator, num_rows, num_columns, device="cuda", dtype=torch.bfloat16)
    total = after.double() + wanted + bias.double()
    fused_linear_fp8(x, weight, scales, after, bias=bias, epilogue=Epilogue.RESIDUAL, **options)
    assert (after.double() - total).norm() <= ERROR * total.norm()
    half = min((num_rows + 1) // 2, 64)  # bits do not depend on the number of rows
    fewer = torch.empty_like(out[:half])
    few = QuantisedRows(x.values[:half], x.scales[:half])
    fused_linear_fp8(few, weight, scales, fewer, **options)
    assert torch.equal(fewer, out[:half])


# The tiles for few rows, then tiles for many rows with any number of rows and columns.
GATED = [
    *((Tiling(192), rows, 24576) for rows in (1, 16, 33, 64)),
    *((Tiling(96), rows, 12288) for rows in (1, 16, 33, 64)),
    *(
        (Tiling(192, rows=tile), rows, columns)
        for tile in (128, 256)
        for rows in (1, 200, 256, 1000)
        for columns in (24576, 400)
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("tiling", "num_rows", "num_columns"), GATED)
def test_gated_rows_against_float64(generator, tiling, num_rows, num_columns):
    case = product_case(generator, num_rows, num_columns, 512, "cuda", torch.bfloat16)
    x, (weight, scales, _), product = case
    assert has_quantise(torch.empty(1, 512, device="cuda").bfloat16())
    gate, up = product.chunk(2, dim=1)
    wanted = functional.silu(gate) * up
    width = num_columns // 2
    room = torch.full((num_rows + 1, width + 8), torch.nan, device="cuda").bfloat16()
    out = room[:num_rows, :width]
    torch.cuda.synchronize()
    options = {"tiling": tiling, "epilogue": Epilogue.SILU_MUL, "early": True}
    fused_linear_fp8(x, weight, scales, out, **options)
    assert (out.double() - wanted).norm() <= 2 * ERROR * wanted.norm()
    assert room[num_rows:].isnan().all() and room[:, width:].isnan().all()
    half = (num_rows + 1) // 2  # bits do not depend on the number of rows
    few, fewer = QuantisedRows(x.values[:half], x.scales[:half]), torch.empty_like(out[:half])
    fused_linear_fp8(few, weight, scales, fewer, **options)
    assert torch.equal(fewer, out[:half])


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (lambda x, out: quantise_rows(x[0], out), "quantise_rows: x must be 2-D"),
        (lambda x, out: quantise_rows(x[:, :8], out), r"out.values must be .* \[2, 8\]"),
        (lambda x, out: rms_norm_quantised(x, x[0, :4], 1e-5, out), "weight must be"),
        (lambda x, out: silu_mul_quantised(x, out), r"out.values must be .* \[2, 8\]"),
        (lambda x, out: rescale(x, x[0], x[0], x), r"row_scales must be .* \[2\]"),
        (lambda x, out: rescale(x, x[:, 0], x[0], x), "row_scales must be contiguous"),
        (lambda x, out: rescale(x, ONES[:2], ONES.double(), x), "column_scales must be float32"),
        (lambda x, out: rescale(x, ONES[:2], ONES, x[:1]), r"out must be .* \[2, 16\]"),
        (lambda x, out: rescale(x, ONES[:2], ONES, x.half()), r"out must be torch.float32"),
        (
            lambda x, out: rescale(x, ONES[:2], ONES, x, bias=ONES[:5]),
            r"bias must be float32 \[16\] on cpu, got torch.float32 \[5\]",
        ),
        (
            lambda x, out: rescale(x, ONES[:2], ONES, x, bias=ONES.half()),
            r"bias must be float32 \[16\] on cpu, got torch.float16",
        ),
        (
            lambda x, out: silu_mul_quantised(x.repeat(1, 2), out, row_scales=ONES[:2]),
            "row_scales and column_scales, or neither",
        ),
        (
            lambda x, out: fused_linear_fp8(out, out.values, x[0], x[:, :5]),
            r"a weight \[5, D\] and 5 scales",
        ),
        (
            lambda x, out: fused_linear_fp8(out, WEIGHT, ONES.half(), x),
            r"scales must be float32 \[16\]",
        ),
        (
            lambda x, out: fused_linear_fp8(out, WEIGHT, ONES.repeat(2)[::2], x),
            "scales must be contiguous",
        ),
        (
            lambda x, out: fused_linear_fp8(out._replace(scales=ONES), WEIGHT, ONES, x),
            r"x.scales must be float32 \[2\]",
        ),
        (
            lambda x, out: fused_linear_fp8(out._replace(values=x), WEIGHT, ONES, x),
            r"x.values must be float8_e4m3fn \[2, 16\]",
        ),
        (
            lambda x, out: fused_linear_fp8(out, WEIGHT, ONES, x, bias=ONES[:4]),
            r"bias must be float32 \[16\]",
        ),
        (
            lambda x, out: fused_linear_fp8(
                out, WEIGHT, ONES, x[:, :8], bias=ONES, epilogue=Epilogue.SILU_MUL
            ),
            "SILU_MUL takes no bias",
        ),
        (
            lambda x, out: add_linear_fp8(out, WEIGHT, ONES.half(), x),
            r"add_linear_fp8: scales must be float32 \[16\]",
        ),
    ],
)
def test_arguments_are_checked(op, message):
    with pytest.raises(ValueError, match=message):
        op(torch.zeros(2, 16), empty_rows(2, 16, "cpu"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": ONES[:2]}, "scales must have 3 numbers or more, got 2"),
        ({"scales": ONES[:3].half()}, "scales must be float32"),
        ({"scales": ONES[:6:2]}, "scales must be contiguous"),
        ({"mean": ONES[:4]}, r"mean must be float32 \[2, 4\]"),
        ({"v": None}, r"wanted fp8\.k, fp8\.v and fp8\.values, or none"),
        ({"values": None}, r"wanted fp8\.k, fp8\.v and fp8\.values, or none"),
        ({"k": torch.zeros(3, 1, 4, dtype=FP8)}, r"fp8\.k must be float8_e4m3fn \[3, 2, 4\]"),
        ({"q": torch.zeros(3, 2, 4)}, r"fp8\.q must be float8_e4m3fn \[3, 2, 4\]"),
    ],
)
def test_copies_of_heads_are_checked(changes, message):
    heads = torch.zeros(3, 2, 4)
    copies = [heads.to(FP8) for _ in range(3)]
    fp8 = Fp8Heads(*copies, heads, torch.zeros(2, 4), ONES[:3])
    tables = torch.ones(3, 4), torch.zeros(3, 4)
    apply_rotary(heads.clone(), heads.clone(), *tables, None, fp8)
    with pytest.raises(ValueError, match=message):
        apply_rotary(heads.clone(), heads.clone(), *tables, None, fp8._replace(**changes))

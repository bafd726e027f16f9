# SPDX-License-Identifier: Apache-2.0
"""Products for all GPUs match float64, in every dtype, ragged, and for all sizes of groups."""

import pytest
import torch

from vllm.diffusion.ops.packed import NF4, NF4_ORDER
from vllm_add_llada.cuda_kernels.fused_ops import (
    PORTABLE,
    Epilogue,
    Packed,
    QuantisedRows,
    fused_linear,
    fused_linear_fp8,
    fused_linear_packed,
    look_up_table,
    pack,
    quantise_rows,
    unpack,
)

pytestmark = pytest.mark.gpu

ERROR = {torch.bfloat16: 6e-3, torch.float16: 8e-4}  # one rounding of fp32 sums
ROWS = [1, 7, 32, 33, 64, 65, 130, 256]
WIDE = 6160  # columns, with so many tiles that 256 rows are not split into many parts
SHAPES = [(16, 8), (48, 136), (4096, 4096), (2064, 1024), (WIDE, 520)]  # columns, depth


def random(generator, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=generator).to("cuda", dtype)


def assert_close(out, wanted, dtype):
    assert (out.double() - wanted).norm() <= ERROR[dtype] * wanted.norm()


def gated(product, dtype):
    gate, up = product.to(dtype).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).double()


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize(("num_columns", "depth"), SHAPES)
@pytest.mark.parametrize("num_rows", ROWS)
def test_plain_products(generator, num_rows, num_columns, depth, dtype):
    x = random(generator, num_rows, depth + 8, dtype=dtype)[:, :depth]
    weight = random(generator, num_columns, depth, dtype=dtype) / 8
    bias = random(generator, num_columns, dtype=dtype)
    wanted = x.double() @ weight.double().t()
    room = torch.full((num_rows + 1, num_columns + 8), torch.nan, device="cuda", dtype=dtype)
    out = room[:num_rows, :num_columns]
    for _ in range(2):  # a call leaves the workspace unchanged
        fused_linear(x, weight, out, tiling=PORTABLE)
        assert_close(out, wanted, dtype)
    assert room[num_rows:].isnan().all() and room[:, num_columns:].isnan().all()
    assert_close(fused_linear(x, weight, tiling=PORTABLE, bias=bias), wanted + bias, dtype)
    before = random(generator, num_rows, num_columns, dtype=dtype)
    after = before.clone()
    fused_linear(x, weight, after, tiling=PORTABLE, epilogue=Epilogue.RESIDUAL)
    assert_close(after, before.double() + wanted, dtype)
    actual = fused_linear(x, weight, tiling=PORTABLE, epilogue=Epilogue.SILU_MUL)
    wanted = gated(wanted, dtype)
    assert (actual.double() - wanted).norm() <= 2 * ERROR[dtype] * wanted.norm()


@pytest.mark.parametrize(("fewer", "more"), [(7, 32), (33, 64), (65, 128)])
def test_rows_do_not_depend_on_the_rows_beside_them(generator, fewer, more):
    x, weight = random(generator, more, 4096), random(generator, 4096, 4096)
    alone = fused_linear(x[:fewer], weight, tiling=PORTABLE)
    assert torch.equal(alone, fused_linear(x, weight, tiling=PORTABLE)[:fewer])


@pytest.mark.parametrize(("num_columns", "depth"), [(48, 144), (4096, 4096), (WIDE, 1040)])
@pytest.mark.parametrize("num_rows", ROWS)
def test_fp8_products(generator, num_rows, num_columns, depth):
    plain = random(generator, num_rows, depth)
    values = torch.empty(num_rows, depth, dtype=torch.float8_e4m3fn, device="cuda")
    x = QuantisedRows(values, torch.empty(num_rows, device="cuda"))
    quantise_rows(plain, x)
    weight = random(generator, num_columns, depth).to(torch.float8_e4m3fn)
    scales = torch.rand(num_columns, generator=generator).cuda() + 0.5
    wanted = (x.values.double() * x.scales[:, None]) @ (weight.double() * scales[:, None]).t()
    out = torch.empty(num_rows, num_columns, dtype=torch.bfloat16, device="cuda")
    fused_linear_fp8(x, weight, scales, out, tiling=PORTABLE)
    assert_close(out, wanted, torch.bfloat16)
    out.fill_(1)
    fused_linear_fp8(x, weight, scales, out, tiling=PORTABLE, epilogue=Epilogue.RESIDUAL)
    assert_close(out, wanted + 1, torch.bfloat16)


@pytest.mark.parametrize("kind", ["int4", "int4 fp16", "nf4"])
@pytest.mark.parametrize("group", [32, 64, 128, 256])
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_of_4_bits(generator, num_rows, group, kind):
    num_columns, depth = (2064, 1024) if num_rows < 256 else (WIDE, 512)
    dtype = torch.float16 if kind.endswith("fp16") else torch.bfloat16
    numbers = torch.randint(16, (num_columns, depth), generator=generator)
    scales = torch.rand(num_columns, depth // group, generator=generator).cuda() / 8 + 0.01
    zeros = torch.randint(16, scales.shape, generator=generator).to("cuda", torch.uint8)
    table = torch.tensor([NF4[i] for i in NF4_ORDER], device="cuda")
    is_table = kind == "nf4"
    weight = Packed(
        pack(numbers).cuda(), scales, None if is_table else zeros, table if is_table else None
    )
    wide = torch.empty(num_columns, depth, device="cuda")
    unpack(weight, wide)
    x = random(generator, num_rows, depth, dtype=dtype)
    look_up = look_up_table(table.tolist()) if is_table else ()
    wanted = x.double() @ wide.double().t()
    out = torch.empty(num_rows, num_columns, dtype=dtype, device="cuda")
    fused_linear_packed(x, weight, out, tiling=PORTABLE, look_up=look_up)
    assert_close(out, wanted, dtype)
    half = torch.empty(num_rows, num_columns // 2, dtype=dtype, device="cuda")
    epilogue = Epilogue.SILU_MUL
    fused_linear_packed(x, weight, half, tiling=PORTABLE, look_up=look_up, epilogue=epilogue)
    wanted = gated(wanted, dtype)
    assert (half.double() - wanted).norm() <= 2 * ERROR[torch.bfloat16] * wanted.norm()

# SPDX-License-Identifier: Apache-2.0
"""fused_ops.fused_linear_packed matches float64 with every tiling and number format."""

import pytest
import torch
from torch.nn import functional

from vllm_add_llada.cuda_kernels.fused_ops import (
    Epilogue,
    Packed,
    Tiling,
    fused_linear_packed,
    has_packed_linear,
    look_up_table,
    pack,
    unpack,
)

ERROR = 4e-3  # norm of the error over that of the result: fp32 sums, one or two roundings to bf16
TABLE_ERROR = 6e-3  # the same with entries of the table rounded to bf16
TABLE = [*(-(2.0 - 0.1 * i) for i in range(4)), *(1.0 + 0.1 * i for i in range(4))] * 2
TILINGS = [
    (Tiling(192), 384, 256),
    (Tiling(192, split=2), 12288, 4096),
    (Tiling(64), 64, 768),
    (Tiling(64, split=2), 4096, 12288),
    (Tiling(64, split=4), 256, 2304),  # in unequal parts
    (Tiling(128, split=4, rows=128), 256, 2304),
    (Tiling(192, rows=128), 12288, 4096),
    (Tiling(128, split=2, rows=256), 4096, 768),
    (Tiling(128, rows=256), 256, 4096),
]
ROWS = [1, 7, 16, 33, 64, 65, 150, 300]


def case(generator, num_columns, depth, group, is_table):
    """Return a weight on the GPU and its fp64 values, with zero groups and very uneven scales."""
    size = (num_columns, depth // group)
    scales = torch.rand(size, generator=generator) * 10.0 ** torch.randint(
        -3, 3, size, generator=generator
    )
    scales[::7, ::3] = 0
    numbers = torch.randint(0, 16, (num_columns, depth), generator=generator)
    zeros = torch.randint(0, 17, size, generator=generator).to("cuda", torch.uint8)
    values, scales = pack(numbers).cuda(), scales.cuda()
    table = torch.tensor(TABLE, device="cuda") if is_table else None
    weight = Packed(values, scales, None if is_table else zeros, table)
    meant = torch.empty(num_columns, depth, device="cuda")
    unpack(weight, meant)
    torch.cuda.synchronize()  # the kernel may read the weight before its writer has ended
    return weight, meant.double()


def assert_near(given, wanted, error):
    assert (given.double() - wanted).norm() <= error * wanted.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("tiling", "num_columns", "depth"), TILINGS)
@pytest.mark.parametrize(("group", "is_table"), [(128, False), (64, False), (64, True)])
def test_against_float64(generator, num_rows, tiling, num_columns, depth, group, is_table):
    weight, meant = case(generator, num_columns, depth, group, is_table)
    error, look_up = (TABLE_ERROR, look_up_table(TABLE)) if is_table else (ERROR, ())
    wide = torch.randn(max(ROWS), depth + 8, generator=generator).to("cuda", torch.bfloat16)
    x = wide[:num_rows, :depth]
    bias = torch.randn(num_columns, generator=generator).to("cuda", torch.bfloat16)
    wanted = x.double() @ meant.t()
    room = torch.full((num_rows + 1, num_columns + 8), torch.nan, device="cuda").bfloat16()
    out = room[:num_rows, :num_columns]
    torch.cuda.synchronize()
    fused_linear_packed(x, weight, out, tiling=tiling, look_up=look_up, early=True)
    assert_near(out, wanted, error)
    assert room[num_rows:].isnan().all() and room[:, num_columns:].isnan().all()
    after = torch.ones_like(out)
    fused_linear_packed(
        x, weight, after, tiling=tiling, look_up=look_up, bias=bias, epilogue=Epilogue.RESIDUAL
    )
    assert_near(after, wanted + bias.double() + 1, error)
    gate, up = wanted.chunk(2, dim=1)
    half = torch.empty(num_rows, num_columns // 2, device="cuda", dtype=torch.bfloat16)
    fused_linear_packed(x, weight, half, tiling=tiling, look_up=look_up, epilogue=Epilogue.SILU_MUL)
    assert_near(half, functional.silu(gate) * up, 3 * error)
    fewer = torch.empty_like(out[: (num_rows + 1) // 2])
    fused_linear_packed(x[: len(fewer)], weight, fewer, tiling=tiling, look_up=look_up)
    assert torch.equal(fewer, out[: len(fewer)])  # bits do not depend on the number of rows


def test_a_cpu_has_none():
    values = torch.zeros(128, 128, dtype=torch.uint8)
    weight = Packed(values, torch.ones(128, 2), torch.zeros(128, 2, dtype=torch.uint8))
    x = torch.zeros(1, 256, dtype=torch.bfloat16)
    assert not has_packed_linear(x, weight)
    with pytest.raises(ValueError, match="compute capability"):
        fused_linear_packed(x, weight, torch.zeros(1, 128).bfloat16(), tiling=Tiling(128))

# SPDX-License-Identifier: Apache-2.0
"""Products in one order: every tile, and every kernel with the same order, write the same bits."""

from typing import Any

import pytest
import torch

from gather_gemm import OrderedConfig, has_ordered, ordered_gemm
from gather_gemm.launch import ORDERED_CONFIGS, choose_ordered
from tests.native.support import relative_error
from vllm_add_llada.cuda_kernels.fused_ops import Epilogue, Tiling, fused_linear, silu_mul

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def numbers(generator: torch.Generator, *shape: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("shape", [(1, 8, 128), (17, 131, 256), (70, 264, 384), (300, 40, 128)])
def test_against_float64(generator, device, dtype, shape):
    num_rows, num_columns, depth = shape
    x = numbers(generator, num_rows, depth + 8, device=device).to(dtype)[:, :depth]
    weight = numbers(generator, num_columns, depth, device=device).to(dtype)
    bias = numbers(generator, num_columns, device=device).to(dtype)
    out = numbers(generator, num_rows, num_columns, device=device).to(dtype)
    product = x.double() @ weight.double().t()
    found = ordered_gemm(x, weight)
    assert relative_error(found, product) < ERROR[dtype]
    wanted = out.double() + product + bias.double()
    added = ordered_gemm(x, weight, out, bias=bias, adds=True)
    assert added is out and relative_error(out, wanted) < ERROR[dtype]


def test_the_reference_multiplies_each_row_alone(generator):
    x, weight = numbers(generator, 40, 96), numbers(generator, 33, 96)
    whole = ordered_gemm(x, weight)
    for rows in (slice(0, 1), slice(7, 30)):
        assert torch.equal(ordered_gemm(x[rows], weight), whole[rows])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4)}, "x must be"),
        ({"weight": torch.zeros(5, 7)}, r"weight must be \['any', 8\]"),
        ({"bias": torch.zeros(4)}, r"bias must be \[5\]"),
        ({"out": torch.zeros(3, 6)}, r"out must be \[4, 5\]"),
        ({"adds": True}, "with adds, out must be given"),
    ],
)
def test_arguments_are_checked(changes, message):
    arguments: dict[str, Any] = {"x": torch.zeros(4, 8), "weight": torch.zeros(5, 8)}
    with pytest.raises(ValueError, match=message):
        ordered_gemm(**(arguments | changes))


def test_no_rows():
    assert ordered_gemm(torch.ones(0, 8), torch.ones(5, 8)).shape == (0, 5)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 64, 65, 128, 300, 8192])
def test_tiles_have_no_empty_half_and_fit_the_memory_of_a_multiprocessor(num_rows):
    for num_columns in (256, 4096, 12_288, 126_464):
        config = choose_ordered(num_rows, num_columns, 132)
        assert config.rows < 2 * max(num_rows, 16)
        stages = config.stages_of(element_bytes=2)
        assert 3 <= stages <= 8
        assert stages * (config.rows + config.columns) * config.depth * 2 <= 200 * 1024


# ---- equal bits on a GPU ----


@pytest.fixture
def tensors() -> Any:
    """Return a function that draws bf16 tensors on the GPU."""
    generator = torch.Generator("cuda").manual_seed(20261129)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").bfloat16()

    return draw


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal, the sign of zero included."""
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 12_288), (4608, 3584), (1000, 2048)])
def test_all_tiles_write_the_same_bits(tensors, shape):
    x, weight, bias = tensors(300, shape[1]), tensors(*shape), tensors(shape[0])
    assert has_ordered(x, weight)
    target = tensors(300, shape[0])
    wanted = None
    for tile in ORDERED_CONFIGS:
        plain = ordered_gemm(x, weight, config=tile)
        out = target.clone()
        ordered_gemm(x, weight, out, bias=bias, adds=True, config=tile)
        wanted = wanted or (plain, out)
        assert is_same(plain, wanted[0]) and is_same(out, wanted[1]), tile


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32, 48, 96, 192])
@pytest.mark.parametrize("depth", [4096, 12_288])
def test_compiled_tilings_have_the_same_order(tensors, columns, depth):
    most_rows = 128 if columns == 192 else 64
    x, weight, bias = tensors(most_rows, depth), tensors(6144, depth), tensors(6144)
    wanted, added = ordered_gemm(x, weight), tensors(most_rows, 6144)
    wanted_sum = ordered_gemm(x, weight, added.clone(), bias=bias, adds=True)
    for count in (1, 2, 31, 64, most_rows):
        rows = slice(most_rows - count, most_rows)
        assert is_same(fused_linear(x[rows], weight, tiling=Tiling(columns)), wanted[rows])
        if columns == 192:  # no kernel adds
            continue
        out = added[rows].clone()
        options: Any = {"tiling": Tiling(columns), "bias": bias, "epilogue": Epilogue.RESIDUAL}
        assert is_same(fused_linear(x[rows], weight, out, **options), wanted_sum[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [12_288, 768])
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_gated_tilings_have_the_same_order(tensors, width, scale):
    x, weight = tensors(300, 4096), tensors(2 * width, 4096) * scale
    tilings = [Tiling(192, rows=128), Tiling(192, rows=256), Tiling(192), Tiling(96)]
    options: Any = {"epilogue": Epilogue.SILU_MUL}
    wanted = fused_linear(x, weight, tiling=tilings[0], **options)
    for tiling, most in zip(tilings, (300, 300, 128, 64), strict=True):
        assert is_same(fused_linear(x[:most], weight, tiling=tiling, **options), wanted[:most])
    apart = silu_mul(ordered_gemm(x, weight))
    assert (apart != wanted).float().mean() < 1e-3  # the two round silu differently


@pytest.mark.gpu
def test_a_tile_of_other_size_is_taken(tensors):
    x, weight = tensors(5, 256), tensors(40, 256)
    tile = OrderedConfig(16, 32, num_warps=4, max_stages=2)
    assert is_same(ordered_gemm(x, weight, config=tile), ordered_gemm(x, weight))

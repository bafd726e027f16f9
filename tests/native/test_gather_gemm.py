# SPDX-License-Identifier: Apache-2.0
"""gather_gemm: against float64, on a GPU and under Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gather_gemm import gather_gemm, is_built
from gather_gemm.launch import choose_config

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
from gather_gemm import _ops, gather_gemm
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

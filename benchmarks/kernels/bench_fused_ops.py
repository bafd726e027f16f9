#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time and bandwidth of fused_ops, beside the same in separate PyTorch operations.

    benchmarks/kernels/bench_fused_ops.py [--ops rms_norm silu_mul] [--rows 32 4096] [--json FILE]

bf16, shapes of LLaDA-8B (rotary in fp32), Dream-7B (grouped heads, rotary in bf16) and LLaDA-MoE
(norm of each head). Queries, keys and values are views of one fused product. Each operation runs
from a CUDA graph over up to 64 inputs (together beyond the cache, from 256 rows or so), in turns
with its PyTorch reference.

    us            one call of ours
    TB/s          bytes that must be read and written at least, over that time
    % of copy     of the bandwidth of a large copy on the device, measured in the same run
    torch us      one call of the PyTorch reference
    ratio         torch us / us
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_timing import compare, copy_bandwidth, rotating, write_table  # noqa: E402
from vllm_add_llada.cuda_kernels import fused_ops  # noqa: E402
from vllm_add_llada.cuda_kernels.fused_ops import reference  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

COLUMNS = ("op", "shape", "us", "TB/s", "% of copy", "torch us", "ratio")
ROWS = (32, 256, 1024, 4096, 16384)
MIN_CALLS = 32


@dataclass(frozen=True)
class Case:
    """One operation on one shape; calls of ours and of torch take what `make` returns."""

    op: str
    shape: str
    num_bytes: int
    make: Callable[[], tuple[object, ...]]
    ours: Callable[..., object]
    torch: Callable[..., object]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device="cuda")


def norm_cases(rows: int) -> Iterator[Case]:
    for width in (4096, 3584, 2048):
        weight = random(width)

        def make(width: int = width, weight: Tensor = weight) -> tuple[object, ...]:
            return random(rows, width), weight, 1e-5, random(rows, width)

        shape, size = f"{rows} x {width}", 4 * rows * width
        yield Case("rms_norm", shape, size, make, fused_ops.rms_norm, reference.rms_norm)


def table_cases(rows: int) -> Iterator[Case]:
    rotary_dim = 128
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cuda") / rotary_dim
    for dtype in (torch.float32, torch.bfloat16):

        def make(dtype: torch.dtype = dtype) -> tuple[object, ...]:
            positions = torch.arange(rows, device="cuda")
            tables = torch.empty(2, rows, rotary_dim, dtype=dtype, device="cuda")
            return positions, 1.0 / 500_000**exponents, *tables.unbind()

        yield Case(
            "rotary_tables",
            f"{rows} x {rotary_dim}, {str(dtype).removeprefix('torch.')} tables",
            rows * (8 + 2 * rotary_dim * dtype.itemsize),
            make,
            fused_ops.rotary_tables,
            reference.rotary_tables,
        )


def rotary_cases(rows: int) -> Iterator[Case]:
    head_dim = 128
    for num_heads, num_kv_heads, table_dtype, has_norm in (
        (32, 32, torch.float32, False),
        (28, 4, torch.bfloat16, False),
        (16, 16, torch.float32, True),
    ):
        weights = random(2, head_dim).unbind()
        heads = (num_heads, num_kv_heads, num_kv_heads)

        def make(
            heads: tuple[int, ...] = heads,
            table_dtype: torch.dtype = table_dtype,
            norm: tuple[object, ...] = (*weights, 1e-5) if has_norm else (),
        ) -> tuple[object, ...]:
            q, k, _ = random(rows, sum(heads), head_dim).split(heads, dim=1)
            angles = random(rows, head_dim, dtype=torch.float32)
            return q, k, *norm, angles.cos().to(table_dtype), angles.sin().to(table_dtype)

        size = 2 * rows * head_dim * (2 * (num_heads + num_kv_heads) + table_dtype.itemsize)
        op = "norm_rotary" if has_norm else "apply_rotary"
        dtype = str(table_dtype).removeprefix("torch.")
        yield Case(
            op,
            f"{rows} x ({num_heads} + {num_kv_heads}) x {head_dim}, {dtype} tables",
            size,
            make,
            getattr(fused_ops, op),
            getattr(reference, op),
        )


def silu_cases(rows: int) -> Iterator[Case]:
    for width in (12288, 1024):

        def make(width: int = width) -> tuple[object, ...]:
            return random(rows, 2 * width), random(rows, width)

        yield Case(
            "silu_mul",
            f"{rows} x {width}",
            6 * rows * width,
            make,
            fused_ops.silu_mul,
            reference.silu_mul,
        )


def store_cases(rows: int) -> Iterator[Case]:
    head_dim = 128
    for num_heads, num_kv_heads in ((32, 32), (28, 4)):
        heads = (num_heads, num_kv_heads, num_kv_heads)

        def make(heads: tuple[int, ...] = heads) -> tuple[object, ...]:
            _, k, v = random(rows, sum(heads), head_dim).split(heads, dim=1)
            caches = random(2, 2 * rows, heads[1], head_dim).unbind()
            slots = torch.randperm(2 * rows, device="cuda")[:rows]
            return k, v, *caches, slots

        yield Case(
            "store_keys_values",
            f"{rows} x {num_kv_heads} x {head_dim}",
            8 * rows * num_kv_heads * head_dim,
            make,
            fused_ops.store_keys_values,
            reference.store_keys_values,
        )


def measure(case: Case) -> list[object]:
    """The row of the table."""
    inputs = rotating(case.make, num_bytes=case.num_bytes)
    # The start of a graph is spread over many calls.
    inputs = inputs * -(-MIN_CALLS // len(inputs))
    ours = [partial(case.ours, *arguments) for arguments in inputs]
    plain = [partial(case.torch, *arguments) for arguments in inputs]
    times = compare({"ours": ours, "torch": plain})
    speed = case.num_bytes / times["ours"].seconds
    us, torch_us = times["ours"].median_us, times["torch"].median_us
    return [
        case.op,
        case.shape,
        round(us, 2),
        round(speed / 1e12, 2),
        round(100 * speed / copy_bandwidth(), 1),
        round(torch_us, 1),
        round(torch_us / us, 1),
    ]


def cases(rows: list[int]) -> Iterator[Case]:
    for kind in (norm_cases, table_cases, rotary_cases, silu_cases, store_cases):
        yield from itertools.chain.from_iterable(kind(number) for number in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", help="names of operations; default: all")
    parser.add_argument(
        "--rows", nargs="+", type=int, default=list(ROWS), help="default: %(default)s"
    )
    parser.add_argument("--json", type=Path, help="file for the record of the run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not fused_ops.is_built():
        parser.error("needs a CUDA device and the compiled module (scripts/test.sh builds it)")
    chosen = [case for case in cases(arguments.rows) if case.op in (arguments.ops or [case.op])]
    print(f"copy: {copy_bandwidth() / 1e12:.2f} TB/s")
    print("{:18} {:44} {:>9} {:>6} {:>10} {:>10} {:>6}".format(*COLUMNS))
    table = []
    for case in chosen:
        row = measure(case)
        table.append(row)
        print("{:18} {:44} {:9.2f} {:6.2f} {:10.1f} {:10.1f} {:6.1f}".format(*row), flush=True)
    title = "fused_ops: row-wise operations"
    write_table(arguments.json, title, COLUMNS, table)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time and bandwidth of fused_ops, compared with separate PyTorch operations.

    benchmarks/kernels/bench_fused_ops.py [--ops rms_norm silu_mul] [--rows 32 4096] [--json FILE]

bf16 and the shapes of LLaDA-8B (rotary in fp32), Dream-7B (grouped heads, rotary in bf16),
LLaDA-MoE (norm of each head), and LLaDA2.0-mini (half of each head is rotated, keys and values are
kept in the same launch). Queries, keys and values are views of one fused product. Each operation
runs from a CUDA graph over up to 64 inputs (together beyond the cache, from about 256 rows on), in
turns with its PyTorch reference.

    us            one call of ours
    TB/s          bytes that must be read and written, over that time
    % of copy     share of the bandwidth of a large copy on the device, measured in the same run
    torch us      one call of the PyTorch reference
    ratio         torch us / us
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_timing import KernelParser, compare, copy_bandwidth, report, rotating
from benchmarks.gpu_timing import random_rows as random
from vllm_add_llada.cuda_kernels import fused_ops
from vllm_add_llada.cuda_kernels.fused_ops import reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

COLUMNS = {"op": "<18", "shape": "<44", "us": ">9.2f", "TB/s": ">6.2f", "% of copy": ">10.1f"}
COLUMNS |= {"torch us": ">10.1f", "ratio": ">6.1f"}
ROWS = (32, 256, 1024, 4096, 16384)
MIN_CALLS = 32


@dataclass(frozen=True)
class Case:
    """Operation on one shape; calls of ours and of torch receive the result of `make`."""

    op: str
    shape: str
    num_bytes: int
    make: Callable[[], tuple[object, ...]]


def norm_cases(rows: int) -> Iterator[Case]:
    for width in (4096, 3584, 2048):
        weight = random(width)

        def make(width: int = width, weight: Tensor = weight) -> tuple[object, ...]:
            return random(rows, width), weight, 1e-5, random(rows, width)

        yield Case("rms_norm", f"{rows} x {width}", 4 * rows * width, make)


def table_cases(rows: int) -> Iterator[Case]:
    rotary_dim = 128
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cuda") / rotary_dim
    for dtype in (torch.float32, torch.bfloat16):

        def make(dtype: torch.dtype = dtype) -> tuple[object, ...]:
            positions = torch.arange(rows, device="cuda")
            tables = torch.empty(2, rows, rotary_dim, dtype=dtype, device="cuda")
            return positions, 1.0 / 500_000**exponents, *tables.unbind()

        shape = f"{rows} x {rotary_dim}, {name_of(dtype)} tables"
        yield Case("rotary_tables", shape, rows * (8 + 2 * rotary_dim * dtype.itemsize), make)


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
        shape = f"({num_heads} + {num_kv_heads}) x {head_dim}, {name_of(table_dtype)} tables"
        yield Case("norm_rotary" if has_norm else "apply_rotary", f"{rows} x {shape}", size, make)
    yield kept_case(rows)


def kept_case(rows: int) -> Case:
    heads, head_dim, rotary_dim = (16, 4, 4), 128, 64
    gains = random(2, head_dim).unbind()

    def make() -> tuple[object, ...]:
        q, k, v = random(rows, sum(heads), head_dim).split(heads, dim=1)
        angles = random(rows, rotary_dim)
        slots = torch.randperm(2 * rows, device="cuda")[:rows]
        kept = fused_ops.Kept(v, *random(2, 2 * rows, heads[1], head_dim).unbind(), slots)
        return q, k, *gains, 1e-5, angles.cos(), angles.sin(), kept

    size = 2 * rows * (head_dim * (2 * (heads[0] + heads[1]) + 3 * heads[1]) + 2 * rotary_dim)
    return Case("norm_rotary", f"{rows} x (16 + 4) x {head_dim}, kept", size, make)


def silu_cases(rows: int) -> Iterator[Case]:
    for width in (12288, 1024):

        def make(width: int = width) -> tuple[object, ...]:
            return random(rows, 2 * width), random(rows, width)

        yield Case("silu_mul", f"{rows} x {width}", 6 * rows * width, make)


def store_cases(rows: int) -> Iterator[Case]:
    head_dim = 128
    for num_heads, num_kv_heads in ((32, 32), (28, 4)):
        heads = (num_heads, num_kv_heads, num_kv_heads)

        def make(heads: tuple[int, ...] = heads) -> tuple[object, ...]:
            _, k, v = random(rows, sum(heads), head_dim).split(heads, dim=1)
            caches = random(2, 2 * rows, heads[1], head_dim).unbind()
            slots = torch.randperm(2 * rows, device="cuda")[:rows]
            return k, v, *caches, slots

        shape = f"{rows} x {num_kv_heads} x {head_dim}"
        yield Case("store_keys_values", shape, 8 * rows * num_kv_heads * head_dim, make)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure(case: Case) -> list[object]:
    """Measure a row of the table."""
    inputs = rotating(case.make, num_bytes=case.num_bytes)
    # Repeat the inputs, so that the launch of the graph is spread over many calls.
    inputs = inputs * -(-MIN_CALLS // len(inputs))
    ours, plain = getattr(fused_ops, case.op), getattr(reference, case.op)
    times = compare(
        {
            "ours": [partial(ours, *arguments) for arguments in inputs],
            "torch": [partial(plain, *arguments) for arguments in inputs],
        }
    )
    speed = case.num_bytes / times["ours"].seconds
    us, torch_us = times["ours"].median_us, times["torch"].median_us
    rates = (round(speed / 1e12, 2), round(100 * speed / copy_bandwidth(), 1))
    return [case.op, case.shape, round(us, 2), *rates, round(torch_us, 1), round(torch_us / us, 1)]


def main() -> None:
    parser = KernelParser(__doc__, ROWS)
    parser.option("--ops", None, "names of operations (default: all)", nargs="+")
    options = parser.parse(is_built=fused_ops.is_built())
    kinds = (norm_cases, table_cases, rotary_cases, silu_cases, store_cases)
    cases = (case for kind in kinds for rows in options.rows for case in kind(rows))
    chosen = (measure(case) for case in cases if case.op in (options.ops or [case.op]))
    report(options.json, "fused_ops: row-wise operations", COLUMNS, chosen)


if __name__ == "__main__":
    main()

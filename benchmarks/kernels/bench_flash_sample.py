#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of the sampling kernels, beside a plain read of the logits, PyTorch and torch.compile.

    benchmarks/kernels/bench_flash_sample.py [--ops margin] [--rows 32 512] [--json FILE]

bf16, the vocabulary of LLaDA. Each variant is a CUDA graph over inputs that together are several
times the cache, and the variants take turns. In a graph, as in the engine, a call of ours is
launched while the one before still runs and waits for its end.

    us         one call of ours
    TB/s       bytes of the logits over that time
    % of copy  of the bandwidth (read plus written) of a large copy on the device, in the same run
    read us    a plain read of the same bytes: the faster of a Triton sum and PyTorch's amax
    of read    us / read us
    torch, compiled
               times that the PyTorch reference and its compiled version take as long
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import flash_sample  # noqa: E402
from benchmarks.gpu_timing import compare, copy_bandwidth, l2_bytes, write_table  # noqa: E402
from flash_sample import Rows, Sampled, Score, reference  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

COLUMNS = ("op", "rows", "us", "TB/s", "% of copy", "read us", "of read", "torch", "compiled")
ROWS = (1, 8, 32, 64, 128, 512, 1024, 2048)
VOCABULARY = 126_464
CACHES = 4  # that the inputs fill together
MOST_ROWS_OF_TORCH = 512  # whose fp32 copies of the logits take several GB

OPS: dict[str, tuple[Score, dict[str, Any]]] = {
    "low_confidence": ("confidence", {}),
    "entropy": ("entropy", {}),
    "entropy, epsilon 1e-8": ("entropy", {"epsilon": 1e-8}),
    "margin": ("margin", {}),
    "low_confidence at 0.2": ("confidence", {"temperature": 0.2}),
    "low_confidence at 1.0": ("confidence", {"temperature": 1.0}),
    "entropy_witht at 1.0": ("entropy", {"temperature": 1.0, "is_tempered": True}),
}


@triton.jit  # type: ignore[untyped-decorator]
def sum_blocks(x, sums, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Every program sums one block."""
    block = tl.program_id(0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets, mask=offsets < count, other=0)
    tl.store(sums + block, tl.sum(values.to(tl.float32)))


def read(x: Tensor) -> Tensor:
    block = 8192
    sums = torch.empty(triton.cdiv(x.numel(), block), device=x.device)
    sum_blocks[sums.shape](x, sums, x.numel(), BLOCK=block, num_warps=8)
    return sums


def make_rows(parameters: dict[str, Any], num_rows: int) -> Rows:
    """Rows of different requests: each has parameters of its own."""
    index = torch.arange(num_rows, device="cuda")
    given = dict(parameters)
    if "temperature" in given:
        temperature = torch.tensor(given["temperature"], dtype=torch.float64, device="cuda")
        given["temperature"] = temperature.repeat(num_rows)
    return Rows(seed=index % 7, step=index % 5, positions=index, **given)


def time_us(
    inputs: list[Tensor], variants: dict[str, Callable[[Tensor], object]]
) -> dict[str, float]:
    calls = {name: [partial(call, x) for x in inputs] for name, call in variants.items()}
    times = compare(calls, repeats=10, warm_up_s=0.02)
    return {name: timing.median_us for name, timing in times.items()}


def bench(num_rows: int, ops: Sequence[str], compiles: bool) -> list[list[object]]:
    """The rows of the table for a number of rows of logits."""
    count = max(2, CACHES * l2_bytes() // (2 * num_rows * VOCABULARY))
    inputs = [
        (torch.randn(num_rows, VOCABULARY, device="cuda") * 4).bfloat16() for _ in range(count)
    ]
    reads = time_us(inputs, {"sum": read, "amax": partial(torch.amax, dim=-1)})
    table = []
    for op in ops:
        score, parameters = OPS[op]
        rows = make_rows(parameters, num_rows)
        us = time_us(inputs, {"ours": partial(flash_sample.candidates, rows=rows, score=score)})
        if num_rows <= MOST_ROWS_OF_TORCH:
            # Of the noise's integer arithmetic torch.compile takes minutes.
            variants = torch_variants(rows, score, compiles and "temperature" not in parameters)
            us |= time_us(inputs[:2], variants)
        rate = inputs[0].nbytes / us["ours"] * 1e6
        slower = [us[name] / us["ours"] if name in us else None for name in ("torch", "compiled")]
        table.append(
            [
                op,
                num_rows,
                us["ours"],
                rate / 1e12,
                100 * rate / copy_bandwidth(),
                min(reads.values()),
                us["ours"] / min(reads.values()),
                *slower,
            ]
        )
        print(line(table[-1]), flush=True)
    return table


def torch_variants(
    rows: Rows, score: Score, compiles: bool
) -> dict[str, Callable[[Tensor], object]]:
    def plain(x: Tensor) -> Sampled:
        return reference.candidates(x, rows, score)

    return {"torch": plain} | (
        {"compiled": torch.compile(plain, dynamic=False)} if compiles else {}
    )


def line(row: Sequence[Any]) -> str:
    op, *numbers = row
    shown = ["-" if number is None else f"{number:.4g}" for number in numbers]
    return ("{:22}" + " {:>9}" * len(shown)).format(op, *shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument(
        "--rows", nargs="+", type=int, default=list(ROWS), help="default: %(default)s"
    )
    parser.add_argument(
        "--compiled-rows",
        nargs="*",
        type=int,
        help="those at which torch.compile takes part, which takes seconds each; default: all",
    )
    parser.add_argument("--json", type=Path, help="file for the record of the run")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not flash_sample.is_built():
        parser.error("needs a CUDA device and the compiled module (scripts/test.sh builds it)")
    print(f"copy: {copy_bandwidth() / 1e12:.2f} TB/s")
    print(("{:22}" + " {:>9}" * (len(COLUMNS) - 1)).format(*COLUMNS))
    table: list[list[Any]] = []
    for num_rows in arguments.rows:
        compiles = arguments.compiled_rows is None or num_rows in arguments.compiled_rows
        table += bench(num_rows, arguments.ops, compiles)
        write_table(arguments.json, "flash_sample: candidates from logits", COLUMNS, table)


if __name__ == "__main__":
    main()

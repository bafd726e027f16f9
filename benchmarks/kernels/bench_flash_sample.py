#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of the sampling kernels, compared with a plain read, PyTorch and torch.compile.

    benchmarks/kernels/bench_flash_sample.py [--ops margin] [--rows 32 512] [--json FILE]

bf16 and the vocabulary of LLaDA. Each variant is a CUDA graph over inputs that together are several
times the cache, and the variants run in turns. In a graph, as in the engine, a call of ours is
launched while the previous call still runs, and waits for its end.

    us         one call of ours
    TB/s       bytes of the logits over that time
    % of copy  share of the bandwidth (read plus written) of a large copy in the same run
    read us    a plain read of the same bytes: the faster of a Triton sum and PyTorch's amax
    of read    us / read us
    torch, compiled
               time of the PyTorch reference and of its compiled version, as multiples of ours
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import flash_sample
from benchmarks.gpu_timing import KernelParser, compare, copy_bandwidth, l2_bytes, report
from flash_sample import Filters, Rows, Sampled, Score, reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

NUMBERS = ("us", "TB/s", "% of copy", "read us", "of read", "torch", "compiled")
COLUMNS = {"op": "<22", "rows": ">9"} | dict.fromkeys(NUMBERS, ">9.4g")
ROWS = (1, 8, 32, 64, 128, 512, 1024, 2048)
VOCABULARY = 126_464
CACHES = 4  # total size of the inputs, in multiples of the cache
MAX_TORCH_ROWS = 512  # the fp32 copies of the logits take several GB

OPS: dict[str, tuple[Score, dict[str, Any]]] = {
    "low_confidence": ("confidence", {}),
    "entropy": ("entropy", {}),
    "entropy, epsilon 1e-8": ("entropy", {"epsilon": 1e-8}),
    "margin": ("margin", {}),
    "low_confidence at 0.2": ("confidence", {"temperature": 0.2}),
    "low_confidence at 1.0": ("confidence", {"temperature": 1.0}),
    "entropy_witht at 1.0": ("entropy", {"temperature": 1.0, "is_tempered": True}),
    "top_p 0.9 at 1.0": ("confidence", {"temperature": 1.0, "filters": Filters(top_p=0.9)}),
    "top_k 50 at 1.0": ("confidence", {"temperature": 1.0, "filters": Filters(top_k=50)}),
    "min_p 0.05 at 1.0": ("confidence", {"temperature": 1.0, "filters": Filters(min_p=0.05)}),
    "top_k, top_p at 0.7": (
        "confidence",
        {"temperature": 0.7, "filters": Filters(top_k=50, top_p=0.9)},
    ),
}


@triton.jit  # type: ignore[untyped-decorator]
def sum_blocks(x, sums, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum one block in every program."""
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
    """Make rows of different requests, each with its own parameters."""
    index = torch.arange(num_rows, device="cuda")
    given = dict(parameters)
    if "temperature" in given:
        temperature = torch.tensor(given["temperature"], dtype=torch.float64, device="cuda")
        given["temperature"] = temperature.repeat(num_rows)
    if "filters" in given:  # Numbers on the device, so that a graph can hold PyTorch's version.
        numbers = {name: getattr(given["filters"], name) for name in ("min_p", "top_k", "top_p")}
        tensors = {name: torch.tensor(number, device="cuda") for name, number in numbers.items()}
        repeated = {name: number.repeat(num_rows) for name, number in tensors.items()}
        given["filters"] = replace(given["filters"], **repeated)
    return Rows(seed=index % 7, step=index % 5, positions=index, **given)


def time_us(
    inputs: list[Tensor], variants: dict[str, Callable[[Tensor], object]]
) -> dict[str, float]:
    calls = {name: [partial(call, x) for x in inputs] for name, call in variants.items()}
    times = compare(calls, repeats=10, warm_up_s=0.02)
    return {name: timing.median_us for name, timing in times.items()}


def bench(num_rows: int, ops: Sequence[str], compiles: bool) -> Iterator[list[object]]:
    """Measure the table rows for one number of rows of logits."""
    count = max(2, CACHES * l2_bytes() // (2 * num_rows * VOCABULARY))
    inputs = [
        (torch.randn(num_rows, VOCABULARY, device="cuda") * 4).bfloat16() for _ in range(count)
    ]
    reads = time_us(inputs, {"sum": read, "amax": partial(torch.amax, dim=-1)})
    read_us = min(reads.values())
    for op in ops:
        score, parameters = OPS[op]
        rows = make_rows(parameters, num_rows)
        us = time_us(inputs, {"ours": partial(flash_sample.candidates, rows=rows, score=score)})
        if num_rows <= MAX_TORCH_ROWS:
            # torch.compile takes minutes for the noise's integer arithmetic.
            variants = torch_variants(rows, score, compiles and "temperature" not in parameters)
            us |= time_us(inputs[:2], variants)
        ours = us["ours"]
        rate = inputs[0].nbytes / ours * 1e6
        slower = [us[name] / ours if name in us else None for name in ("torch", "compiled")]
        numbers = (ours, rate / 1e12, 100 * rate / copy_bandwidth(), read_us, ours / read_us)
        yield [op, num_rows, *numbers, *slower]


def torch_variants(
    rows: Rows, score: Score, compiles: bool
) -> dict[str, Callable[[Tensor], object]]:
    def plain(x: Tensor) -> Sampled:
        return reference.candidates(x, rows, score)

    return {"torch": plain} | (
        {"compiled": torch.compile(plain, dynamic=False)} if compiles else {}
    )


def main() -> None:
    parser = KernelParser(__doc__, ROWS)
    parser.option("--ops", list(OPS), choices=OPS)
    help_text = "rows at which torch.compile takes part, which takes seconds each (default: all)"
    parser.option("--compiled-rows", None, help_text, nargs="*", type=int)
    options = parser.parse(is_built=flash_sample.is_built())
    few = options.rows if options.compiled_rows is None else options.compiled_rows
    rows = (row for count in options.rows for row in bench(count, options.ops, count in few))
    report(options.json, "flash_sample: candidates from logits", COLUMNS, rows)


if __name__ == "__main__":
    main()

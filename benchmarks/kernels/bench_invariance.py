#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Products of a batch-invariant engine compared with the usual ones: their bits, and their time.

    benchmarks/kernels/bench_invariance.py [--rows 32 256] [--sweep 1] [--json FILE]

Random numbers in bf16 with the shapes of LLaDA-8B, and of SDAR-8B's grouped heads. Every variant is
a CUDA graph, and the variants run in turns.

    usual      microseconds of the kernel that the usual engine chooses
    invariant  microseconds of the kernel that sums from low to high depth
    ratio      the latter over the former
    triton     microseconds of Triton's kernel in that order
    TFLOP/s    of the invariant one

With --sweep N, cuBLAS multiplies with every N-th number of rows up to 8,192 instead, beginning with
the number from which `vllm.diffusion.ops.dispatch` allows cuBLAS for the shape, else with 1.
For each shape the table has the number of row counts for which some bit differs from a sum from
low to high depth, with the first and last of them, for a product that is stored and for one that is
added.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from benchmarks.gpu_timing import KernelParser, compare, report, rotating
from benchmarks.gpu_timing import random_rows as random
from gather_gemm import ordered_gemm
from vllm.diffusion import ops
from vllm.diffusion.core.buffers import FreshBuffers
from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.invariant import multiply_by_cublas

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

COLUMNS = {"op": "<9", "shape": "<15", "rows": ">5", "usual": ">9", "invariant": ">9"}
COLUMNS |= {"ratio": ">6", "triton": ">9", "TFLOP/s": ">8"}
SWEEP_COLUMNS = {"shape": "<15", "from": ">5", "row counts": ">10", "adds": ">5"}
SWEEP_COLUMNS |= {"differ": ">7", "first": ">6", "last": ">6"}
ROWS = (1, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
LAYER = {"qkv": (12288, 4096), "grouped qkv": (6144, 4096), "out": (4096, 4096)}
LAYER |= {"gate_up": (24576, 4096), "down": (4096, 12288)}
SWEPT = ((4096, 4096), (4096, 12288), (3584, 3584), (3584, 18944), (4608, 3584), (4096, 14336))
SWEPT += ((2048, 2048), (12288, 4096), (6144, 4096), (24576, 4096), (37888, 3584), (126464, 4096))
KEPT = 16  # rows that are compared, at both ends
SCRATCH = FreshBuffers(torch.device("cuda", 0))


def layer_of(weight: Tensor) -> Any:
    """Return an object with the attributes of an upstream layer that a projection reads."""
    return SimpleNamespace(quant_method=UnquantizedLinearMethod(), weight=weight, bias=None)


def use_of(name: str, projection: ops.Projection, x: Tensor, out: Tensor) -> Callable[[], object]:
    """Return the call of a projection that a layer makes."""
    if name == "gate_up":
        return partial(projection.gated, x, out, SCRATCH)
    if name in ("out", "down"):
        return partial(projection.add_to, out, x, SCRATCH)
    return partial(projection.project, x, out, SCRATCH)


def time_rows(all_rows: Sequence[int]) -> Iterator[list[object]]:
    """Yield the rows of the table of times."""
    for name, (columns, depth) in LAYER.items():
        weights = rotating(lambda columns=columns, depth=depth: random(columns, depth) * 0.02)
        usual = [ops.PlainProjection(layer_of(weight)) for weight in weights]
        invariant = [ops.InvariantProjection(layer_of(weight)) for weight in weights]
        for rows in all_rows:
            x, out = random(rows, depth), random(rows, columns // (1 + (name == "gate_up")))
            call = partial(use_of, name, x=x, out=out)
            variants = {
                "usual": [call(projection) for projection in usual],
                "invariant": [call(projection) for projection in invariant],
            }
            if name != "gate_up":
                options = {"adds": name in ("out", "down")}
                variants["triton"] = [
                    partial(ordered_gemm, x, weight, out, **options) for weight in weights
                ]
            times = compare(variants, repeats=10, warm_up_s=0.02)
            us, chosen = times["usual"].median_us, times["invariant"]
            yield [
                name,
                f"{columns} x {depth}",
                rows,
                round(us, 1),
                round(chosen.median_us, 1),
                round(chosen.median_us / us, 3),
                round(times["triton"].median_us, 1) if "triton" in times else None,
                round(2.0 * rows * columns * depth / chosen.seconds / 1e12, 1),
            ]


def sweep(step: int) -> Iterator[list[object]]:
    """Yield the rows of the table of cuBLAS's bits."""
    most = dispatch.MAX_MEASURED_ROWS
    for columns, depth in SWEPT:
        weight, x = random(columns, depth) * 0.02, random(most, depth)
        first = dispatch.unsplit_cublas_rows(columns, depth) or 1
        counts = range(first, most + 1, step)
        for adds in (False, True) if columns <= depth else (False,):
            target, out = random(most, columns), torch.empty_like(random(most, columns))
            wanted = ordered_gemm(x, weight, target.clone(), adds=adds)
            is_other = torch.zeros(len(counts), dtype=torch.bool, device="cuda")
            for number, rows in enumerate(counts):
                ends = [slice(0, min(rows, KEPT)), slice(max(rows - KEPT, 0), rows)]
                for some in ends:
                    out[some].copy_(target[some])
                multiply_by_cublas(x[:rows], weight, out[:rows], adds=adds)
                found = [(out[some] != wanted[some]).any() for some in ends]
                is_other[number] = found[0] | found[1]
            pairs = zip(counts, is_other.tolist(), strict=True)
            differing = [rows for rows, other in pairs if other]
            bounds = (differing[0], differing[-1]) if differing else (None, None)
            yield [f"{columns} x {depth}", first, len(counts), adds, len(differing), *bounds]


def main() -> None:
    parser = KernelParser(__doc__, ROWS)
    parser.option("--sweep", 0, "compare the bits of cuBLAS with every N-th number of rows")
    options = parser.parse()
    if options.sweep:
        report(options.json, "cuBLAS in one part", SWEEP_COLUMNS, sweep(options.sweep))
    else:
        report(options.json, "batch-invariant products", COLUMNS, time_rows(options.rows))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Products of a batch-invariant engine compared with the usual ones: their bits, and their time.

    benchmarks/kernels/bench_invariance.py [--rows 32 256] [--sweep 1] [--json FILE]

Random numbers in bf16 with the shapes of LLaDA-8B, and of SDAR-8B's grouped heads. Every variant is
a CUDA graph, and the variants run in turns. cuBLAS has no workspace in both.

    usual      microseconds of the kernel that the usual engine chooses
    invariant  microseconds of the kernel of a batch-invariant engine
    ratio      the latter over the former
    TFLOP/s    of the invariant one

With --sweep N, each weight is multiplied with every N-th number of rows up to 8,192 instead. For
each shape the table has the number of row counts for which some bit differs from the product of
8,192 rows, with the first and last of them, for a product that is stored and for one that is added.
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
from vllm.diffusion import ops
from vllm.diffusion.core.stages import FreshBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TypeAlias

    from torch import Tensor

    Use: TypeAlias = Callable[[Tensor, Tensor], object]

COLUMNS = {"op": "<9", "shape": "<15", "rows": ">5", "usual": ">9", "invariant": ">9"}
COLUMNS |= {"ratio": ">6", "TFLOP/s": ">8"}
SWEEP_COLUMNS = {"shape": "<15", "row counts": ">10", "adds": ">5"}
SWEEP_COLUMNS |= {"differ": ">7", "first": ">6", "last": ">6"}
ROWS = (1, 16, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
LAYER = {"qkv": (12288, 4096), "grouped qkv": (6144, 4096), "out": (4096, 4096)}
LAYER |= {"gate_up": (24576, 4096), "down": (4096, 12288)}
SWEPT = ((4096, 4096), (4096, 12288), (3584, 3584), (3584, 18944), (4608, 3584), (4096, 14336))
SWEPT += ((2048, 2048), (12288, 4096), (6144, 4096), (24576, 4096), (37888, 3584), (126464, 4096))
KEPT = 16  # rows that are compared, at both ends
MAX_ROWS = 8192
SCRATCH = FreshBuffers(torch.device("cuda", 0))


def layer_of(weight: Tensor) -> Any:
    """Return an object with the attributes of an upstream layer that a projection reads."""
    return SimpleNamespace(quant_method=UnquantizedLinearMethod(), weight=weight, bias=None)


def use_of(name: str, projection: ops.Projection) -> Use:
    """Return the call of a projection that a layer makes, with rows and their result."""
    if name == "gate_up":
        return lambda x, out: projection.gated(x, out, SCRATCH)
    if name in ("out", "down"):
        return lambda x, out: projection.add_to(out, x, SCRATCH)
    return lambda x, out: projection.project(x, out, SCRATCH)


def time_rows(all_rows: Sequence[int]) -> Iterator[list[object]]:
    """Yield the rows of the table of times."""
    for name, (columns, depth) in LAYER.items():
        weights = rotating(lambda columns=columns, depth=depth: random(columns, depth) * 0.02)
        usual = [ops.PlainProjection(layer_of(weight)) for weight in weights]
        invariant = [ops.InvariantProjection(layer_of(weight)) for weight in weights]
        for rows in all_rows:
            x, out = random(rows, depth), random(rows, columns // (1 + (name == "gate_up")))
            variants = {
                kind: [partial(use_of(name, projection), x, out) for projection in projections]
                for kind, projections in (("usual", usual), ("invariant", invariant))
            }
            times = compare(variants, repeats=10, warm_up_s=0.02)
            us, chosen = times["usual"].median_us, times["invariant"]
            yield [
                name,
                f"{columns} x {depth}",
                rows,
                round(us, 1),
                round(chosen.median_us, 1),
                round(chosen.median_us / us, 3),
                round(2.0 * rows * columns * depth / chosen.seconds / 1e12, 1),
            ]


def sweep(step: int) -> Iterator[list[object]]:
    """Yield the rows of the table of bits."""
    for columns, depth in SWEPT:
        projection = ops.InvariantProjection(layer_of(random(columns, depth) * 0.02))
        x, target = random(MAX_ROWS, depth), random(MAX_ROWS, columns)
        for adds in (False, True) if columns <= depth else (False,):
            use = use_of("out" if adds else "qkv", projection)
            differing = rows_that_differ(use, x, target, step)
            bounds = (differing[0], differing[-1]) if differing else (None, None)
            count = len(range(1, MAX_ROWS + 1, step))
            yield [f"{columns} x {depth}", count, adds, len(differing), *bounds]


def rows_that_differ(use: Use, x: Tensor, target: Tensor, step: int) -> list[int]:
    """Return every number of rows, of each `step`-th one, whose product has other bits."""
    counts = range(1, MAX_ROWS + 1, step)
    wanted, out = target.clone(), target.clone()
    use(x, wanted)
    is_other = torch.zeros(len(counts), dtype=torch.bool, device="cuda")
    for number, rows in enumerate(counts):
        ends = [slice(0, min(rows, KEPT)), slice(max(rows - KEPT, 0), rows)]
        for some in ends:
            out[some].copy_(target[some])
        use(x[:rows], out[:rows])
        differ = [(out[some] != wanted[some]).any() for some in ends]
        is_other[number] = differ[0] | differ[1]
    pairs = zip(counts, is_other.tolist(), strict=True)
    return [rows for rows, other in pairs if other]


def main() -> None:
    parser = KernelParser(__doc__, ROWS)
    parser.option("--sweep", 0, "compare bits with every N-th number of rows")
    options = parser.parse()
    ops.allow_workspace(False)
    if options.sweep:
        report(options.json, "products by number of rows", SWEEP_COLUMNS, sweep(options.sweep))
    else:
        report(options.json, "batch-invariant products", COLUMNS, time_rows(options.rows))


if __name__ == "__main__":
    main()

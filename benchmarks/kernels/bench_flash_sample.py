# SPDX-License-Identifier: Apache-2.0
"""Time of the sampling kernels, against a plain read, PyTorch and torch.compile.

    python benchmarks/kernels/bench_flash_sample.py --json flash_sample.json

One line for each operation and shape: microseconds, bytes of the logits per second, that as a share
of the device-to-device copy bandwidth (bytes read plus written) of the same run, the time as a
multiple of a plain read of the same bytes (the faster of a Triton sum and amax), and how many
times slower the PyTorch reference and its compiled version are. Inputs rotate through more memory
than the L2 cache holds; calls are captured in a CUDA graph, so that gaps between launches do not
count; times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language
from torch import Tensor

import flash_sample
from flash_sample import Rows, Score, reference

if TYPE_CHECKING:
    from collections.abc import Callable

ROTATED_BYTES = 256 << 20  # several times the L2 cache


def measure(call: Callable[[Tensor], object], inputs: list[Tensor], repeats: int = 15) -> float:
    """Median microseconds of one call, over graph replays that go through all inputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for each in inputs[:2]:
            call(each)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for each in inputs:
            call(each)
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(inputs))
    return float(statistics.median(times[3:]))


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a large device-to-device copy."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return 2 * source.numel() * source.itemsize / float(statistics.median(times[2:]))


@triton.jit  # type: ignore[untyped-decorator]
def sum_blocks(x, sums, count, BLOCK: triton.language.constexpr):  # type: ignore[no-untyped-def]
    """A plain read: every program sums one block."""
    block = triton.language.program_id(0)
    offsets = block * BLOCK + triton.language.arange(0, BLOCK)
    values = triton.language.load(x + offsets, mask=offsets < count, other=0)
    triton.language.store(sums + block, triton.language.sum(values.to(triton.language.float32)))


def read(x: Tensor) -> Tensor:
    block = 8192
    num_blocks = triton.cdiv(x.numel(), block)
    sums = torch.empty(num_blocks, device=x.device)
    sum_blocks[(num_blocks,)](x, sums, x.numel(), BLOCK=block, num_warps=8)
    return sums


def operations() -> dict[str, tuple[Score, dict[str, Any]]]:
    """Score and parameters of each benched operation."""
    return {
        "low_confidence": ("confidence", {}),
        "entropy": ("entropy", {}),
        "entropy eps 1e-8": ("entropy", {"epsilon": 1e-8}),
        "margin": ("margin", {}),
        "low_confidence at 0.2": ("confidence", {"temperature": 0.2}),
        "low_confidence at 1.0": ("confidence", {"temperature": 1.0}),
        "entropy_witht at 1.0": ("entropy", {"temperature": 1.0, "is_tempered": True}),
    }


def make_rows(parameters: dict[str, Any], num_rows: int) -> Rows:
    index = torch.arange(num_rows, device="cuda")
    given = dict(parameters)
    if "temperature" in given:
        temperature = torch.tensor(given["temperature"], dtype=torch.float64, device="cuda")
        given["temperature"] = temperature.repeat(num_rows)
    return Rows(seed=index % 7, step=index % 5, positions=index, **given)


def bench(num_rows: int, num_columns: int, dtype: torch.dtype, args: argparse.Namespace) -> None:
    num_bytes = num_rows * num_columns * dtype.itemsize
    count = max(2, ROTATED_BYTES // num_bytes)
    inputs = [
        (torch.randn(num_rows, num_columns, device="cuda") * 4).to(dtype) for _ in range(count)
    ]
    read_us = min(measure(read, inputs), measure(lambda x: x.amax(dim=-1), inputs))
    sys.stdout.write(f"plain read of {num_rows} rows: {read_us:.1f} us\n")
    for name, (score, parameters) in operations().items():
        if args.only and not any(word in name for word in args.only):
            continue
        rows = make_rows(parameters, num_rows)
        found: dict[str, Any] = {
            "op": name,
            "rows": num_rows,
            "columns": num_columns,
            "dtype": str(dtype)[6:],
            "us": measure(lambda x: flash_sample.candidates(x, rows, score), inputs),  # noqa: B023
            "read_us": read_us,
        }
        found["tb_per_s"] = num_bytes / found["us"] * 1e-6
        found["of_copy"] = found["tb_per_s"] * 1e12 / args.copy
        found["of_read"] = found["us"] / read_us
        if num_rows in args.baseline_rows:

            def plain(x: Tensor) -> object:
                return reference.candidates(x, rows, score)[:2]  # noqa: B023

            few = inputs[:2]
            found["torch_us"] = measure(plain, few, 5)
            if not args.no_compile:
                found["compiled_us"] = measure(torch.compile(plain, dynamic=False), few, 5)
        args.results.append(found)
        sys.stdout.write(line(found) + "\n")
        sys.stdout.flush()


def line(found: dict[str, Any]) -> str:
    ratios = [
        f"{found[key] / found['us']:7.1f}" if key in found else "      -"
        for key in ("torch_us", "compiled_us")
    ]
    return (
        f"{found['op']:<22} {found['rows']:>5} x {found['columns']} {found['dtype']:<8} "
        f"{found['us']:8.1f} us {found['tb_per_s']:5.2f} TB/s {found['of_copy']:6.1%} of copy "
        f"{found['of_read']:5.2f} x read; torch {ratios[0]} x, compiled {ratios[1]} x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128, 512, 2048])
    parser.add_argument("--baseline-rows", type=int, nargs="*", default=[32, 512])
    parser.add_argument("--columns", type=int, default=126_464)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--only", nargs="*", help="operations whose name has one of these words")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available() or not flash_sample.is_built():
        sys.exit("bench_flash_sample: needs a CUDA device and the compiled module")
    torch.manual_seed(0)
    args.copy, args.results = copy_bandwidth(), []
    device = torch.cuda.get_device_name()
    sys.stdout.write(f"{device}, copy {args.copy * 1e-12:.2f} TB/s, torch {torch.__version__}\n")
    for name in args.dtypes:
        for num_rows in args.rows:
            bench(num_rows, args.columns, getattr(torch, name), args)
    if args.json:
        result = {"device": device, "copy_bytes_per_s": args.copy, "results": args.results}
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

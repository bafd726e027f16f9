#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of mapping memory, and speed of mapped memory.

    benchmarks/kernels/bench_vmm.py [--json vmm.json]

* Mapping: microseconds per chunk, for one call over many chunks and for one call per chunk. `grow`
  creates and maps, `keep` unmaps to spares, `regrow` maps spares, `shrink` unmaps and releases.
  Times are medians of several rounds; then the time of each driver call within all of them.
* Speed: a matrix product and a copy into the arena, compared with the same into ordinary memory,
  in turns; medians of event times.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_timing import KernelParser, compare, write_record
from benchmarks.harness import Table
from vmm_allocator import Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

MIB = 1 << 20
GIB = 1 << 30
CUDA = torch.device("cuda", 0)
OPERATIONS = ("grow", "keep", "regrow", "shrink")
PHASES = ("create", "map", "access", "unmap", "release", "wait")
CHUNKS = {"chunk_mib": ">9", "num_chunks": ">10", "batched": ">7"}
MAPPING = CHUNKS | dict.fromkeys([*OPERATIONS, *(f"{name}_call" for name in PHASES)], ">12.2f")
SPEED = {"call": "<38", "ordinary_us": ">11.2f", "mapped_us": ">11.2f"}


def map_times(chunk_bytes: int, num_chunks: int, batched: bool, rounds: int) -> dict[str, float]:
    """Measure the median microseconds per chunk of each operation, and of the driver calls."""
    per_call = num_chunks if batched else 1
    times: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    total = num_chunks * chunk_bytes

    def timed(name: str, call: Callable[[int], object], reverse: bool = False) -> None:
        ends = range(per_call, num_chunks + 1, per_call)
        start = time.perf_counter()
        for end in reversed(ends) if reverse else ends:
            call(end * chunk_bytes)
        times[name].append((time.perf_counter() - start) / num_chunks * 1e6)

    size = per_call * chunk_bytes
    with Arena(total, chunk_bytes=chunk_bytes) as arena:
        for _ in range(rounds):
            timed("grow", arena.grow)
            timed("keep", lambda end: arena.shrink(end - size, keep=True), reverse=True)
            timed("regrow", arena.grow)
            timed("shrink", lambda end: arena.shrink(end - size), reverse=True)
        actual = arena.statistics()
    row = {name: statistics.median(values) for name, values in times.items()}
    created, mapped = actual.num_chunks_created, actual.num_chunks_mapped
    for name in PHASES:
        seconds = getattr(actual, f"{name}_seconds")
        row[f"{name}_call"] = seconds / (created if name in ("create", "release") else mapped) * 1e6
    return row


def mapping_table(rounds: int) -> list[dict[str, Any]]:
    """Measure a row for each chunk size, with one call and with one call per chunk."""
    table, rows = Table(MAPPING), []
    for chunk_mib in (2, 16, 64, 256):
        num_chunks = max(16, min(512, 8192 // chunk_mib))
        for batched in (True, False):
            row = {"chunk_mib": chunk_mib, "num_chunks": num_chunks, "batched": batched}
            rows.append(row | map_times(chunk_mib * MIB, num_chunks, batched, rounds))
            table.add(list(rows[-1].values()))
    return rows


def speed_table(repeats: int) -> list[dict[str, Any]]:
    """Measure a row for each call into ordinary memory and into the arena's memory, in turns."""
    table, rows = Table(SPEED), []

    def add(name: str, call: Callable[..., object], outs: Sequence[Tensor]) -> None:
        # Each call takes microseconds, so five calls run between two events.
        calls = {str(i): [partial(call, out)] * 5 for i, out in enumerate(outs)}
        times = compare(calls, repeats=repeats, use_graphs=False).values()
        rows.append(dict(zip(SPEED, [name, *(time.median_us for time in times)], strict=True)))
        table.add(list(rows[-1].values()))

    with Arena(64 * GIB) as arena:
        arena.grow(4 * GIB)
        for num_rows in (32, 1024, 8192):
            left = torch.randn(num_rows, 4096, device=CUDA, dtype=torch.bfloat16)
            right = torch.randn(4096, 12288, device=CUDA, dtype=torch.bfloat16)
            ordinary = torch.empty(num_rows, 12288, device=CUDA, dtype=torch.bfloat16)
            outs = (ordinary, arena.tensor(0, (num_rows, 12288), torch.bfloat16))
            name = f"mm [{num_rows}, 4096] x [4096, 12288]"
            add(name, lambda out, a=left, b=right: torch.mm(a, b, out=out), outs)
            assert torch.equal(*outs)
            del outs
        source = torch.randint(0, 255, (GIB,), device=CUDA, dtype=torch.uint8)
        outs = (torch.empty_like(source), arena.tensor(GIB, (GIB,), torch.uint8))
        add("copy 1 GiB", lambda out: out.copy_(source), outs)
        del outs
    return rows


def main() -> None:
    parser = KernelParser(__doc__)
    parser.option("--rounds", 5, "rounds of the mapping times")
    parser.option("--repeats", 30, "repeats of the speed times")
    options = parser.parse()
    mapping, speed = mapping_table(options.rounds), speed_table(options.repeats)
    if options.json:
        tables = {"mapping_us_a_chunk": mapping, "speed": speed}
        write_record(options.json, {"device": torch.cuda.get_device_name(), **tables})


if __name__ == "__main__":
    main()

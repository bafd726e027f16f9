# SPDX-License-Identifier: Apache-2.0
"""Time of mapping memory, and speed of mapped memory.

    python benchmarks/kernels/bench_vmm.py --json vmm.json

* Mapping: microseconds a chunk, for one call over many chunks and for one call a chunk. `grow`
  creates and maps, `keep` unmaps to spares, `regrow` maps spares, `shrink` unmaps and releases.
  Medians of several rounds.
* Speed: a matrix product and a copy into the arena against the same into ordinary memory, turn by
  turn; medians of event times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vmm_allocator import Arena

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
GIB = 1 << 30
CUDA = torch.device("cuda", 0)
OPERATIONS = ("grow", "keep", "regrow", "shrink")
PHASES = ("create", "map", "access", "unmap", "release", "wait")


def map_times(chunk_bytes: int, num_chunks: int, batched: bool, rounds: int) -> dict[str, float]:
    """Median microseconds a chunk of each operation, and of the driver calls within all of them."""
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


def mapping_table(rounds: int) -> list[dict[str, float | bool]]:
    rows: list[dict[str, float | bool]] = []
    for chunk_mib in (2, 16, 64, 256):
        for batched in (True, False):
            num_chunks = max(16, min(512, 8192 // chunk_mib))
            row = map_times(chunk_mib * MIB, num_chunks, batched, rounds)
            rows.append(
                {"chunk_mib": chunk_mib, "num_chunks": num_chunks, "batched": batched, **row}
            )
    return rows


def event_times(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median microseconds of each call, turn by turn."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 5):
        for index, call in enumerate(calls):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(5):
                call()
            end.record()
            end.synchronize()
            if turn >= 5:
                times[index].append(start.elapsed_time(end) * 1e3 / 5)
    return [statistics.median(values) for values in times]


def speed_table(repeats: int) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    with Arena(64 * GIB) as arena:
        arena.grow(4 * GIB)
        for num_rows in (32, 1024, 8192):
            left = torch.randn(num_rows, 4096, device=CUDA, dtype=torch.bfloat16)
            right = torch.randn(4096, 12288, device=CUDA, dtype=torch.bfloat16)
            ordinary = torch.empty(num_rows, 12288, device=CUDA, dtype=torch.bfloat16)
            mapped = arena.tensor(0, (num_rows, 12288), torch.bfloat16)
            outs = (ordinary, mapped)
            times = event_times([partial(torch.mm, left, right, out=out) for out in outs], repeats)
            assert torch.equal(*outs)
            name = f"mm [{num_rows}, 4096] x [4096, 12288]"
            rows.append({"call": name, "ordinary_us": times[0], "mapped_us": times[1]})
            del mapped, outs
        source = torch.randint(0, 255, (GIB,), device=CUDA, dtype=torch.uint8)
        outs = (torch.empty_like(source), arena.tensor(GIB, (GIB,), torch.uint8))
        times = event_times([partial(out.copy_, source) for out in outs], repeats)
        rows.append({"call": "copy 1 GiB", "ordinary_us": times[0], "mapped_us": times[1]})
        del outs
    return rows


def show(rows: list[dict[str, float | str]] | list[dict[str, float | bool]]) -> None:
    """A table on standard output."""
    lines = [list(rows[0])]
    lines += [[f"{v:.2f}" if type(v) is float else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        sys.stdout.write("  ".join(cells) + "\n")
    sys.stdout.write("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the tables to this file")
    parser.add_argument("--rounds", type=int, default=5, help="of the mapping times")
    parser.add_argument("--repeats", type=int, default=30, help="of the speed times")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_vmm: needs a CUDA device")
    tables = {
        "device": torch.cuda.get_device_name(),
        "mapping_us_a_chunk": mapping_table(arguments.rounds),
        "speed": speed_table(arguments.repeats),
    }
    for rows in tables.values():
        if isinstance(rows, list):
            show(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(tables, indent=2) + "\n")


if __name__ == "__main__":
    main()

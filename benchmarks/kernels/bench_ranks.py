#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of a sum over tensor-parallel ranks, with the residual, within CUDA graphs.

    torchrun --nproc-per-node 2 benchmarks/kernels/bench_ranks.py [--json ranks.json]

Rows [M, 4096] of bf16: microseconds of x += sum, with our kernel for several numbers of blocks, and
with NCCL's and PyTorch's symmetric-memory sums followed by an addition. Every graph holds 64 sums.
Before that, the result of our kernel is compared with NCCL's sum.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import distributed
from torch.distributed import _symmetric_memory as symmetric_memory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_timing import KernelParser, write_record
from benchmarks.harness import Table
from vllm_add_llada.cuda_kernels import fused_ops

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 4096
ROWS = (32, 64, 128, 256, 512, 1024, 4096, 8192)
BLOCKS = (16, 32, 64, 128, 132, 264)
IN_GRAPH, ROUNDS = 64, 12


class Memory:
    """Pair of buffers that all ranks read, and their meetings."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        group = distributed.group.WORLD
        size = 2 * num_bytes + fused_ops.flag_bytes()
        self.whole = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(self.whole, group)
        self.whole.zero_()
        starts = [int(start) for start in handle.buffer_ptrs]
        calls, is_over = (
            fused_ops.call_counts(device),
            torch.zeros(1, dtype=torch.int32).pin_memory(),
        )
        self.meetings = [
            fused_ops.Meeting(
                tuple(start + turn * num_bytes for start in starts),
                tuple(start + 2 * num_bytes for start in starts),
                calls,
                is_over,
                distributed.get_rank(),
            )
            for turn in range(2)
        ]
        torch.cuda.synchronize()
        distributed.barrier()

    def part(self, rows: int) -> torch.Tensor:
        """Return a view [rows, WIDTH] of the first buffer."""
        return self.whole[: rows * WIDTH * 2].view(torch.bfloat16).view(rows, WIDTH)


def graph_us(run: Callable[[], object]) -> float:
    """Measure the median time of one of many calls in a graph, in microseconds."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(IN_GRAPH // 2):
            run()
    times = []
    for _ in range(ROUNDS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        distributed.barrier()
        graph.replay()
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / IN_GRAPH * 1000)
    return statistics.median(times)


def ways(memory: Memory, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the ways to sum by name; each function runs two sums."""
    group = distributed.group.WORLD.group_name
    part, plain = memory.part(len(x)), torch.randn_like(x)

    def ours(blocks: int) -> None:
        for meeting in memory.meetings:
            fused_ops.sum_ranks(meeting, x, x, most_blocks=blocks)

    def nccl() -> None:
        for _ in range(2):
            distributed.all_reduce(plain)
            x.add_(plain)

    def one_shot() -> None:
        for _ in range(2):
            x.add_(torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group))

    def two_shot() -> None:
        for _ in range(2):
            torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", group)
            x.add_(part)

    functions: dict[str, Callable[[], object]] = {"nccl": nccl}
    functions |= {"one shot": one_shot, "two shots": two_shot}
    return functions | {f"ours, {n} blocks": lambda n=n: ours(n) for n in BLOCKS}


def check(memory: Memory, x: torch.Tensor) -> None:
    """Check that the sum equals NCCL's, with equal bits on all ranks, also in replayed graphs."""
    part = torch.randn_like(x, dtype=torch.float32).bfloat16()
    memory.part(len(x)).copy_(part)
    wanted = part.float()
    distributed.all_reduce(wanted)
    wanted = (wanted + x.float()).bfloat16()
    out = x.clone()
    fused_ops.sum_ranks(memory.meetings[0], out, x, most_blocks=64)
    fused_ops.sum_ranks(memory.meetings[1], torch.empty_like(x), x, most_blocks=64)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    gathered = part.new_empty(distributed.get_world_size(), *part.shape)
    fused_ops.gather_ranks(memory.meetings[0], gathered, most_blocks=64)
    assert torch.equal(gathered[distributed.get_rank()], part)
    fused_ops.gather_ranks(memory.meetings[1], torch.empty_like(gathered), most_blocks=64)


def main() -> None:
    options = KernelParser(__doc__, ROWS).parse()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    is_first = distributed.get_rank() == 0
    torch.manual_seed(distributed.get_rank())
    memory = Memory(max(options.rows) * WIDTH * 2, device)
    table, rows = None, []
    for num_rows in options.rows:
        x = torch.zeros(num_rows, WIDTH, device=device, dtype=torch.bfloat16)
        check(memory, x)
        row: dict[str, float] = {"rows": num_rows}
        for name, run in ways(memory, x).items():
            row[name] = round(graph_us(run), 2)
            x.zero_()
        rows.append(row)
        if is_first:
            table = table or Table(dict.fromkeys(row, ">16"))
            table.add(list(row.values()))
    if options.json and is_first:
        write_record(options.json, {"rows": rows})
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()

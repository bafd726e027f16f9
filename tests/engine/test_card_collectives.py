# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers of GPUs that read each other's memory: exact bits, graphs, a failing rank."""

import os
import sys
from functools import reduce
from typing import cast

import torch
from torch import Tensor, distributed

from tests.programs import output_of
from vllm.diffusion.core.errors import RankError
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.engine.worker.agreement import Agreement
from vllm.diffusion.ops.collectives import CardCollectives
from vllm.diffusion.parallel.host_board import HostBoard

BUFFER_BYTES = 1 << 16


def numbers(*shape: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a rank, which every rank can compute."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype).cuda()


def check_sums(ranks: CardCollectives, rank: int, size: int, dtype: torch.dtype) -> None:
    """Check sums in one part and in several parts, and in a graph after 0 to 4 other calls."""
    scratch = FreshBuffers(torch.device("cuda"))
    for rows in (1, 7, 64, 300):
        parts = [numbers(rows, 264, rank=other, dtype=dtype) for other in range(size)]
        mine, x = parts[rank], numbers(rows, 264, rank=9, dtype=dtype)
        wanted = reduce(torch.add, [part.float() for part in (*parts, x)]).to(dtype)

        def write(some: slice, out: Tensor, mine: Tensor = mine) -> None:
            out.copy_(mine[some])

        actual = x.clone()
        ranks.add_sum(actual, write, scratch)
        assert torch.equal(actual, wanted)
        static = x.clone()
        graph = torch.cuda.CUDAGraph()
        ranks.align()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ranks.add_sum(static, write, scratch)
            ranks.align()
        for turn in range(5):
            static.copy_(x)
            for _ in range(turn):
                assert torch.equal(ranks.gather(mine), torch.stack(parts))
            ranks.align()
            graph.replay()
            assert torch.equal(static, wanted)


def check_failure(ranks: CardCollectives, board: HostBoard, rank: int, size: int) -> None:
    """Make all ranks but the first fail while the first one waits in kernels; then all continue."""
    agreement = Agreement(ranks, board=board)
    x = torch.ones(64, 256, device="cuda")
    for _ in range(3):
        error: Exception | None = None
        if rank == 0:
            for _ in range(5):
                ranks.sum(x)
        else:
            ranks.sum(x)
            error = ValueError("this rank broke")
        actual = agreement.reach(error)
        assert isinstance(actual, ValueError if rank else RankError)
        assert ranks.sum(torch.ones(8, device="cuda")).tolist() == [size] * 8
        assert agreement.reach(None) is None
        assert agreement.all_reduce_max(rank + 5) == size + 4


def run_rank() -> None:
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    group = cast("distributed.ProcessGroup", distributed.group.WORLD)
    board = HostBoard.join(group)
    assert board is not None
    ranks = CardCollectives(group, board, device, BUFFER_BYTES)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_sums(ranks, rank, size, dtype)
    # Less than a vector of 16 bytes, no multiple of it, and more than the buffers hold.
    for count in (3, 1025, 300 * 264 + 2):
        parts = [numbers(count, rank=other, dtype=torch.float32) for other in range(size)]
        assert torch.equal(ranks.sum(parts[rank].clone()), reduce(torch.add, parts))
    # This is larger than the buffer, so the process group gathers it.
    large = numbers(300, 264, rank=rank, dtype=torch.float32)
    assert torch.equal(ranks.gather(large)[rank], large)
    check_failure(ranks, board, rank, size)
    distributed.destroy_process_group()


def test_gpus_sum_and_go_on_after_a_failure(num_gpus: int) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_gpus)]
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    output_of(sys.executable, *command, __file__, env=environment)


if __name__ == "__main__":
    run_rank()

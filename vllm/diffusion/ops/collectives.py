# SPDX-License-Identifier: Apache-2.0
"""What crosses tensor-parallel ranks within a step: sums with the residual, and records.

On the cards of one host ranks read each other's memory, in kernels of ours that a CUDA graph can
hold; elsewhere, and beyond that memory, PyTorch's process group does it (NCCL, gloo). All ranks
come to the same bits.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch
from torch import distributed

from vllm.diffusion.ops import dispatch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm_add_llada.cuda_kernels import fused_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from vllm.diffusion.buffers import Buffers

logger = init_logger(__name__)

_ALIGNMENT = 16  # bytes of what the kernels read at a time


class Collectives:
    """Sums over the ranks of a process group, and gathers.

    Args:
        group: of the ranks, for tensors of the device.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.num_ranks = group.size()

    def add_sum(self, x: Tensor, write: Callable[[slice, Tensor], None], scratch: Buffers) -> None:
        """x += the sum over the ranks of what `write` writes, in place.

        Args:
            x: [R, D], contiguous; the same on all ranks.
            write: (rows, out) writes this rank's part of these rows of x, like them.
            scratch: memory for the part.
        """
        part = scratch.take("projected", tuple(x.shape), x.dtype)
        write(slice(0, len(x)), part)
        distributed.all_reduce(part, group=self._group)
        x.add_(part)

    def sum(self, x: Tensor) -> Tensor:
        """x = the sum over the ranks of x, contiguous, in place; returns it."""
        distributed.all_reduce(x, group=self._group)
        return x

    def gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks [ranks, ...], each like this rank's."""
        out = part.new_empty(self.num_ranks * part.shape[0], *part.shape[1:])
        distributed.all_gather_into_tensor(out, part.contiguous(), group=self._group)
        return out.view(self.num_ranks, *part.shape)


class CardCollectives(Collectives):
    """The same of cards that read each other's memory.

    Each rank has two buffers that all can read, and writes them in turn: when it writes one again,
    all have met for the other, so nobody reads the first any more. A graph begins and ends with the
    first of the two.

    Args:
        group: of the ranks; all are processes of one host.
        device: of this rank.
        buffer_bytes: of each of the two buffers; larger sums go through them in parts, and larger
            gathers through the process group.
    """

    def __init__(
        self, group: distributed.ProcessGroup, device: torch.device, buffer_bytes: int
    ) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        super().__init__(group)
        self._buffer_bytes = buffer_bytes // _ALIGNMENT * _ALIGNMENT
        size = 2 * self._buffer_bytes + fused_ops.flag_bytes()
        self._memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        self._is_over = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        starts = [int(start) for start in self._handle.buffer_ptrs]
        calls = fused_ops.call_counts(device)
        self._meetings = [
            fused_ops.Meeting(
                parts=tuple(start + turn * self._buffer_bytes for start in starts),
                flags=tuple(start + 2 * self._buffer_bytes for start in starts),
                calls=calls,
                is_over=self._is_over,
                rank=group.rank(),
            )
            for turn in range(2)
        ]
        self._turn = 0
        self._nothing = torch.zeros(self.num_ranks, _ALIGNMENT, dtype=torch.uint8, device=device)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        distributed.barrier(group=group, device_ids=[device.index])

    def add_sum(self, x: Tensor, write: Callable[[slice, Tensor], None], scratch: Buffers) -> None:
        for rows in self._pieces(x):
            some = x[rows]
            write(rows, self._part(some))
            self._sum(some, some)

    def sum(self, x: Tensor) -> Tensor:
        if x.nbytes > self._buffer_bytes:
            return super().sum(x)
        if x.nbytes % _ALIGNMENT:
            return x.copy_(self.gather(x).sum(dim=0))
        self._part(x).copy_(x)
        self._sum(x, None)
        return x

    def gather(self, part: Tensor) -> Tensor:
        padded = -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        if padded > self._buffer_bytes or not part.numel():
            return super().gather(part)
        self._buffer(part.nbytes).copy_(part.contiguous().view(-1).view(torch.uint8))
        out = torch.empty(self.num_ranks, padded, dtype=torch.uint8, device=part.device)
        self._gather(out)
        return out[:, : part.nbytes].view(part.dtype).view(self.num_ranks, *part.shape)

    def align(self) -> None:
        """Make the first of the two buffers the next one."""
        if self._turn:
            self._gather(self._nothing)

    def _pieces(self, x: Tensor) -> Iterator[slice]:
        """Rows that fit into a buffer."""
        most = max(self._buffer_bytes // (x.shape[1] * x.element_size()), 1)
        return (slice(start, start + most) for start in range(0, len(x), most))

    def _part(self, like: Tensor) -> Tensor:
        return self._buffer(like.nbytes).view(like.dtype).view(like.shape)

    def _buffer(self, num_bytes: int) -> Tensor:
        """What the next call reads of this rank."""
        start = self._turn * self._buffer_bytes
        return self._memory[start : start + num_bytes]

    def _sum(self, out: Tensor, residual: Tensor | None) -> None:
        most = dispatch.ranks_blocks(out.nbytes)
        fused_ops.sum_ranks(self._meetings[self._turn], out, residual, most_blocks=most)
        self._turn = 1 - self._turn

    def _gather(self, out: Tensor) -> None:
        most = dispatch.ranks_blocks(out.nbytes)
        fused_ops.gather_ranks(self._meetings[self._turn], out, most_blocks=most)
        self._turn = 1 - self._turn


_of_cards: CardCollectives | None = None


def tensor_parallel() -> Collectives:
    """Of this process's tensor-parallel ranks."""
    return _of_cards or Collectives(get_tp_group().device_group)


def align_ranks() -> None:
    """To be called before and after what a CUDA graph captures, and before its replay."""
    if _of_cards is not None:
        _of_cards.align()


def join_cards(device: torch.device, buffer_bytes: int) -> None:
    """Let the tensor-parallel ranks read each other's cards where they can; all ranks call it."""
    global _of_cards
    _of_cards = None
    group = get_tp_group()
    if device.type != "cuda" or group.world_size == 1:
        return
    places: list[tuple[str, int, bool]] = [("", 0, False)] * group.world_size
    mine = (socket.gethostname(), device.index, fused_ops.has_sum_ranks(group.world_size))
    distributed.all_gather_object(places, mine, group=group.cpu_group)
    hosts, cards, are_built = zip(*places, strict=True)
    others = [card for card in cards if card != device.index]
    sees_all = (
        len(set(hosts)) == 1
        and len(set(cards)) == len(cards)
        and all(torch.cuda.can_device_access_peer(device.index, card) for card in others)
    )
    found = [False] * group.world_size
    distributed.all_gather_object(found, sees_all and all(are_built), group=group.cpu_group)
    if all(found):
        _of_cards = CardCollectives(group.device_group, device, buffer_bytes)
    else:
        logger.warning("tensor parallel: cards do not read each other's memory; NCCL sums")

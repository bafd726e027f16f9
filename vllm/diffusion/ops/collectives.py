# SPDX-License-Identifier: Apache-2.0
"""Communication of tensor-parallel ranks within a step: sums with the residual, and gathers.

GPUs of one host read each other's memory in our own kernels, which a CUDA graph can capture.
Otherwise PyTorch's process group is used (NCCL, gloo), also to gather more than the buffers hold.
All ranks compute equal bits. Except with NCCL, the parts of the ranks are added in the order of the
ranks and rounded once, so a row's bits do not depend on the number of rows.

A rank that fails in a step would leave the others waiting for it. On one host they read its
failure from their shared board, stop waiting, and all reset before the next step
(`engine/worker/agreement.py`).
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, cast

import torch
from torch import distributed

from vllm.diffusion.core import stages
from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.ops import dispatch
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm_add_llada.cuda_kernels import fused_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.parallel.host_board import HostBoard

logger = init_logger(__name__)

_ALIGNMENT = 16  # bytes that the kernels read at a time


class Collectives:
    """Sums and gathers over the ranks of a process group.

    Args:
        group: group of the ranks, for tensors of the device.
        board: shared counters of the ranks, if they are on one host.
    """

    def __init__(self, group: distributed.ProcessGroup, board: HostBoard | None = None) -> None:
        self._group, self._board = group, board
        self.num_ranks = group.size()

    def add_sum(self, x: Tensor, write: Callable[[slice, Tensor], None], scratch: Buffers) -> None:
        """Add to x, in place, the sum over the ranks of the parts that `write` computes.

        Args:
            x: [R, D], contiguous; equal on all ranks.
            write: (rows, out) writes this rank's part for these rows of x, in their shape.
            scratch: memory for the part.
        """
        part = stages.projected(x.dtype, x.shape[1]).take(scratch, len(x))
        write(slice(0, len(x)), part)
        self._add(x, part)

    def sum(self, x: Tensor) -> Tensor:
        """Replace contiguous x by its sum over the ranks, and return it."""
        self._wait(distributed.all_reduce(x, group=self._group, async_op=True))
        return x

    def _add(self, x: Tensor, part: Tensor) -> None:
        """Add the sum of all ranks' parts to x; the part may be overwritten."""
        x.add_(self.sum(part))

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts of all ranks, [ranks, ...], each of the shape [N, ...] of `part`."""
        out = part.new_empty(self.num_ranks * part.shape[0], *part.shape[1:])
        self._wait(
            distributed.all_gather_into_tensor(
                out, part.contiguous(), group=self._group, async_op=True
            )
        )
        return out.view(self.num_ranks, *part.shape)

    def align(self) -> None:
        """Prepare for a CUDA graph; must be called around a capture, and before a replay."""

    @property
    def can_reset(self) -> bool:
        """Whether the ranks can continue after one of them has left the others waiting."""
        return self._board is not None and distributed.get_backend(self._group) == "gloo"

    def stop_waiting(self) -> None:
        """Announce that this rank makes no more calls; the other ranks read this from the board."""

    def reset(self) -> None:
        """Discard calls that not all ranks have made; every rank must call this."""
        ranks = distributed.get_process_group_ranks(self._group)
        group = distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self._group = cast("distributed.ProcessGroup", group)

    def _wait(self, work: distributed.Work | None) -> None:
        """Wait for work; on the host, stop waiting if another rank fails."""
        assert work is not None  # this rank belongs to the group
        if self.can_reset and self._board is not None:
            self._board.wait(work)
        else:
            work.wait()


def add_in_order(parts: Iterable[Tensor]) -> Tensor:
    """Add tensors of one dtype in the given order, in at least fp32, and round once.

    `torch.sum` may add in an order that depends on the shape.
    """
    first, *others = parts
    exact = torch.promote_types(first.dtype, torch.float32)
    return reduce(torch.add, others, first.to(exact)).to(first.dtype)


class HostCollectives(Collectives):
    """Sums and gathers of ranks on CPUs: the parts are gathered, and added in rank order.

    gloo's own sums add in an order that depends on the size if there are more than two ranks.
    """

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(add_in_order(self.gather(x)))

    def _add(self, x: Tensor, part: Tensor) -> None:
        x.copy_(add_in_order([*self.gather(part), x]))


class CardCollectives(Collectives):
    """Sums and gathers of GPUs that read each other's memory.

    Each rank has two buffers that all ranks can read, and writes them in turn. When it writes one
    again, all ranks have finished a call with the other one, so none still reads the first. A
    graph begins and ends with the first of the two.

    Args:
        group: group of the ranks; all are processes of one host.
        board: shared counters of the ranks.
        device: this rank's device.
        buffer_bytes: bytes of each of the two buffers; larger sums are computed in pieces, and
            larger gathers use the process group.
    """

    def __init__(
        self,
        group: distributed.ProcessGroup,
        board: HostBoard,
        device: torch.device,
        buffer_bytes: int,
    ) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        super().__init__(group, board)
        self._device, self._all = device, board
        self._buffer_bytes = buffer_bytes // _ALIGNMENT * _ALIGNMENT
        size = 2 * self._buffer_bytes + fused_ops.flag_bytes()
        self._memory = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        starts = [int(start) for start in self._handle.buffer_ptrs]
        self._calls = fused_ops.call_counts(device)
        board.share_with_gpu()
        self._meetings = [
            fused_ops.Meeting(
                parts=tuple(start + turn * self._buffer_bytes for start in starts),
                flags=tuple(start + 2 * self._buffer_bytes for start in starts),
                calls=self._calls,
                is_over=board.is_over,
                rank=board.rank,
            )
            for turn in range(2)
        ]
        self._turn = 0
        self._nothing = torch.zeros(self.num_ranks, _ALIGNMENT, dtype=torch.uint8, device=device)
        self.reset()

    def add_sum(self, x: Tensor, write: Callable[[slice, Tensor], None], scratch: Buffers) -> None:
        for rows in self._pieces(x):
            some = x[rows]
            write(rows, self._part(some))
            self._sum(some, some)

    def sum(self, x: Tensor) -> Tensor:
        unit = _ALIGNMENT // x.element_size()
        for some in x.view(-1).split(self._buffer_bytes // x.element_size()):
            out = some
            if len(some) % unit:  # the rest of the last vector is padding with any numbers
                out = some.new_empty(len(some) + unit - len(some) % unit)
            self._part(out)[: len(some)].copy_(some)
            self._sum(out, None)
            if out is not some:
                some.copy_(out[: len(some)])
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
        if self._turn:
            self._gather(self._nothing)

    @property
    def can_reset(self) -> bool:
        return True

    def stop_waiting(self) -> None:
        # Other ranks wait for work of earlier steps.
        torch.cuda.synchronize(self._device)
        self._all.is_over.fill_(1)

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        # No rank computes any more.
        self._all.exchange(0)
        self._memory[2 * self._buffer_bytes :].zero_()
        self._calls.zero_()
        self._turn = 0
        torch.cuda.synchronize(self._device)
        if self._all.rank == 0:
            self._all.is_over.fill_(0)
        self._all.exchange(0)

    def _pieces(self, x: Tensor) -> Iterator[slice]:
        """Yield ranges of rows that fit into a buffer."""
        max_rows = max(self._buffer_bytes // (x.shape[1] * x.element_size()), 1)
        return (slice(start, start + max_rows) for start in range(0, len(x), max_rows))

    def _part(self, like: Tensor) -> Tensor:
        return self._buffer(like.nbytes).view(like.dtype).view(like.shape)

    def _buffer(self, num_bytes: int) -> Tensor:
        """Return this rank's memory that the next call reads."""
        start = self._turn * self._buffer_bytes
        return self._memory[start : start + num_bytes]

    def _sum(self, out: Tensor, residual: Tensor | None) -> None:
        meeting = self._meetings[self._turn]
        fused_ops.sum_ranks(meeting, out, residual, most_blocks=dispatch.RANKS_BLOCKS)
        self._turn = 1 - self._turn

    def _gather(self, out: Tensor) -> None:
        meeting = self._meetings[self._turn]
        fused_ops.gather_ranks(meeting, out, most_blocks=dispatch.RANKS_BLOCKS)
        self._turn = 1 - self._turn

    def _wait(self, work: distributed.Work | None) -> None:
        assert work is not None
        work.wait()


_current: Collectives | None = None


def tensor_parallel() -> Collectives:
    """Return the collectives of this process's tensor-parallel ranks."""
    return _current or Collectives(get_tp_group().device_group)


def align_ranks() -> None:
    """Prepare for a CUDA graph; must be called before and after a capture, and before a replay."""
    if _current is not None:
        _current.align()


def join_ranks(
    device: torch.device, buffer_bytes: int, board: HostBoard | None, *, is_invariant: bool = False
) -> None:
    """Set up the collectives that `tensor_parallel` returns; every tensor-parallel rank calls it.

    Args:
        device: this rank's device.
        buffer_bytes: bytes that the ranks of several GPUs sum at a time.
        board: shared counters of these ranks, if they are on one host.
        is_invariant: whether sums must have one order for any number of rows.

    Raises:
        ServerConfigError: on every rank, if `is_invariant` and only NCCL can sum.
    """
    global _current
    _current = None
    group = get_tp_group()
    if group.world_size == 1:
        return
    if device.type != "cuda":
        _current = HostCollectives(group.device_group, board)
    elif board is not None and _reads_others(device, board):
        _current = CardCollectives(group.device_group, board, device, buffer_bytes)
    elif is_invariant:
        raise ServerConfigError(
            f"batch_invariant: given {group.world_size} tensor-parallel ranks, whose parts NCCL "
            "would add in an order that depends on the size; wanted 1, 2, 4 or 8 GPUs of one host "
            "that read each other's memory (nvidia-smi topo -p2p r)"
        )
    else:
        logger.warning(
            "tensor parallel: the GPUs cannot read each other's memory, so NCCL adds the parts"
        )
        _current = Collectives(group.device_group)


def _reads_others(device: torch.device, board: HostBoard) -> bool:
    """Return whether every rank's GPU can read the memory of all others."""
    cards = board.exchange(device.index)
    sees_all = len(set(cards)) == len(cards) and all(
        torch.cuda.can_device_access_peer(device.index, card)
        for card in cards
        if card != device.index
    )
    return all(board.exchange(int(sees_all and fused_ops.has_sum_ranks(board.size))))

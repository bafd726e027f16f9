# SPDX-License-Identifier: Apache-2.0
"""Ranks of one engine, in two directions of parallelism.

Each tensor-parallel rank has a part of the weights and all rows of a step. Sequence-parallel ranks
have the same weights and different rows. Rank r of an engine has number r % TP in its
tensor-parallel group and number r // TP in its sequence-parallel group.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from vllm.diffusion.parallel.host_board import HostBoard
from vllm.distributed import get_tp_group
from vllm.distributed.parallel_state import get_world_group, init_model_parallel_group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from vllm.distributed.parallel_state import GroupCoordinator


class RankGroup:
    """Ranks of one group, with collective operations that all of them must call.

    This class is a single rank, which exchanges nothing.

    Attributes:
        rank: number of this rank in the group.
        size: number of ranks.
    """

    rank, size = 0, 1

    def exchange(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        """Send every rank its part of `given`, and receive a part from each.

        Args:
            out: contiguous, written: the received parts, by rank.
            given: contiguous: the sent parts, by rank.
            received: sizes, in the first dimension of `out`, of the parts of the ranks.
            sent: sizes, in the first dimension of `given`, of the parts of the ranks.
        """
        out.copy_(given)

    def gather(self, given: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, ...]; they must have equal shapes."""
        return given[None]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return the tensor of rank 0, which replaces this rank's tensor."""
        return tensor

    def all_reduce_min(self, number: int) -> int:
        """Return the smallest number of all ranks; the host waits for all of them."""
        return number

    def all_gather_object(self, text: str | None) -> list[str | None]:
        """Return the texts of all ranks, by rank; the host waits for all of them."""
        return [text]

    def join_board(self) -> HostBoard | None:
        """Return these ranks' board if they are several on one host; every rank must call this."""
        return None


ALONE = RankGroup()


class ConnectedGroup(RankGroup):
    """Ranks in separate processes, connected by torch's collectives.

    After `listen`, the hosts check a board while they wait for other ranks, and stop waiting when
    one of these has failed (`engine/worker/agreement.py`). This works only with gloo.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        self._device, self._host = group.device_group, group.cpu_group
        self.rank, self.size = group.rank_in_group, group.world_size
        self._board: HostBoard | None = None

    def exchange(
        self, out: Tensor, given: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> None:
        counts = list(received), list(sent)
        self._run(dist.all_to_all_single, out, given, *counts, group=self._device)

    def gather(self, given: Tensor) -> Tensor:
        out = given.new_empty(self.size * given.shape[0], *given.shape[1:])
        self._run(dist.all_gather_into_tensor, out, given.contiguous(), group=self._device)
        return out.view(self.size, *given.shape)

    def broadcast(self, tensor: Tensor) -> Tensor:
        self._run(dist.broadcast, tensor, group=self._device, group_src=0)
        return tensor

    def all_reduce_min(self, number: int) -> int:
        smallest = torch.tensor(number)
        self._run(dist.all_reduce, smallest, op=dist.ReduceOp.MIN, group=self._host)
        return int(smallest)

    def all_gather_object(self, text: str | None) -> list[str | None]:
        texts: list[str | None] = [None] * self.size
        dist.all_gather_object(texts, text, group=self._host)
        return texts

    def _run(self, collective: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Run a collective; after `listen`, stop waiting if another rank fails."""
        if self._board is None:
            collective(*arguments, **named)
        else:
            self._board.wait(collective(*arguments, async_op=True, **named))

    # ---- when a rank fails ----

    def join_board(self) -> HostBoard | None:
        return HostBoard.join(self._host) if self.size > 1 else None

    def listen(self, board: HostBoard) -> None:
        """Check a board for failures while waiting; it may also include other ranks."""
        self._board = board

    @property
    def can_reset(self) -> bool:
        return self._board is not None

    def stop_waiting(self) -> None:
        """Do nothing, because the other ranks check the board."""

    def reset(self) -> None:
        ranks = dist.get_process_group_ranks(self._host)
        self._host, self._device = (
            dist.new_group(ranks, backend="gloo", use_local_synchronization=True) for _ in range(2)
        )


@dataclass(frozen=True)
class Ranks:
    """Ranks that this rank computes with, including itself.

    Attributes:
        tensor: ranks with the same rows and other parts of the weights.
        sequence: ranks with the same weights and other rows.
        every: all ranks of the engine.
    """

    tensor: RankGroup = ALONE
    sequence: RankGroup = ALONE
    every: RankGroup = ALONE

    @classmethod
    def join(cls, tensor_size: int, sequence_size: int) -> Ranks:
        """Return this process's ranks, after upstream's groups exist; every process must call."""
        size = tensor_size * sequence_size
        engines = [range(first, first + size) for first in range(0, dist.get_world_size(), size)]
        tensor = ConnectedGroup(get_tp_group())
        if sequence_size == 1:
            return cls(tensor, ALONE, tensor)
        every = _group("ranks", [list(engine) for engine in engines])
        if tensor_size == 1:
            return cls(ALONE, every, every)
        rows = [list(e[number::tensor_size]) for e in engines for number in range(tensor_size)]
        return cls(tensor, _group("rows", rows), every)

    def connect(self, device: torch.device) -> None:
        """Open the connections of ranks that divide rows, before free memory is measured."""
        peers, ones = self.sequence, torch.ones(self.sequence.size, device=device)
        counts = [1] * peers.size
        peers.exchange(torch.empty_like(ones), ones, counts, counts)
        peers.gather(ones)
        peers.broadcast(ones)

    @property
    def are_several(self) -> bool:
        """Whether other ranks wait in collectives that this rank must join."""
        return self.every.size > 1

    def rows(self, num_rows: int) -> list[slice]:
        """Divide the rows of a step into consecutive ranges, one per sequence-parallel rank.

        The first range is the longest; the last ones may be shorter, or empty.
        """
        size = -(-num_rows // self.sequence.size)
        starts = [min(rank * size, num_rows) for rank in range(self.sequence.size + 1)]
        return [slice(start, end) for start, end in itertools.pairwise(starts)]


def _group(name: str, members: list[list[int]]) -> ConnectedGroup:
    """Create several groups together with all processes; return the group of this process."""
    world = get_world_group()
    backend = dist.get_backend(world.device_group)
    return ConnectedGroup(
        init_model_parallel_group(
            members, world.local_rank, backend, group_name=name, use_device_communicator=False
        )
    )

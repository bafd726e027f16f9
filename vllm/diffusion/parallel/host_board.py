# SPDX-License-Identifier: Apache-2.0
"""Communication between the ranks of one host in shared memory, without their devices."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed

from vllm.diffusion.core.errors import RankError, RankMemoryError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Codes that ranks exchange: the outcome of a common operation, or the kind of a message.
WELL, NO_MEMORY, FAILED, NUMBER = range(4)

_MAX_RANKS = 8
# Polls of the board before other processes may use the core, and seconds between later polls.
_SPINS, _PAUSE_S = 200, 2e-5
_LOOK_S = 1e-5  # seconds between two polls of work on the host
_MEMORY = "/dev/shm"


def processes_here(group: distributed.ProcessGroup) -> list[int]:
    """Return the other processes of a group on this host; every process must call this."""
    mine = (socket.gethostname(), os.getpid())
    hosts = [mine] * group.size()
    distributed.all_gather_object(hosts, mine, group=group)
    return [pid for host, pid in hosts if host == mine[0] and pid != mine[1]]


class HostBoard:
    """Shared memory with a number of every rank, exchanged repeatedly, and a flag for kernels.

    All ranks must call `exchange` equally often. A rank cannot be two calls ahead of another, so
    two places per rank, used in turn, are enough.

    Args:
        path: path of a file of `SIZE` zero bytes, which all ranks must have mapped before the first
            call.
        rank, size: this rank's number, and the number of ranks.
    """

    SIZE = mmap.PAGESIZE

    def __init__(self, path: str, rank: int, size: int) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self.SIZE)
        words = np.frombuffer(self._memory, dtype=np.int64)
        # [turn, rank]: the count of a call, and the number sent with it.
        self._counts = words[: 2 * _MAX_RANKS].reshape(2, _MAX_RANKS)[:, :size]
        self._numbers = words[2 * _MAX_RANKS : 4 * _MAX_RANKS].reshape(2, _MAX_RANKS)[:, :size]
        self._words = words
        self.is_over = torch.from_numpy(words[4 * _MAX_RANKS : 4 * _MAX_RANKS + 1])
        self.rank, self.size = rank, size
        self._count = 0

    @classmethod
    def join(cls, group: distributed.ProcessGroup) -> HostBoard | None:
        """Return the board of a process group for objects, or None if the group spans hosts.

        Every process of the group must call this.
        """
        rank, size = group.rank(), group.size()
        hosts: list[str] = [""] * size
        distributed.all_gather_object(hosts, socket.gethostname(), group=group)
        if len(set(hosts)) > 1 or size > _MAX_RANKS:
            return None
        path: list[str] = [""]
        if rank == 0:
            descriptor, path[0] = tempfile.mkstemp(dir=_MEMORY if os.path.isdir(_MEMORY) else None)
            os.truncate(descriptor, cls.SIZE)
            os.close(descriptor)
        distributed.broadcast_object_list(path, group=group, group_src=0)
        board = cls(path[0], rank, size)
        distributed.barrier(group=group)
        if rank == 0:
            os.unlink(path[0])
        return board

    def share_with_gpu(self) -> None:
        """Make `is_over` readable for kernels on this process's GPU."""
        address = self._words.ctypes.data
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, self.SIZE, 1))

    def exchange(self, number: int) -> Sequence[int]:
        """Publish a number of 63 bits, wait for all ranks, and return their numbers by rank."""
        self._count += 1
        turn = self._count % 2
        self._numbers[turn, self.rank] = number
        self._counts[turn, self.rank] = self._count
        looks = 0
        while (self._counts[turn] < self._count).any():
            looks += 1
            time.sleep(0 if looks < _SPINS else _PAUSE_S)
        numbers: list[int] = self._numbers[turn].tolist()
        return numbers

    def wait(self, work: distributed.Work) -> None:
        """Wait for work, but stop if another rank fails.

        Raises:
            RankError: another rank has failed.
        """
        while not work.is_completed():
            failure = self.failure_of_others()
            if failure == NO_MEMORY:
                raise RankMemoryError("another rank has no memory for it")
            if failure:
                raise RankError("another rank failed")
            time.sleep(_LOOK_S)
        work.wait()

    def failure_of_others(self) -> int:
        """Return the largest code of the ranks waiting in the next exchange, or 0 without any."""
        count = self._count + 1
        turn = count % 2
        return int(((self._counts[turn] == count) * self._numbers[turn]).max())

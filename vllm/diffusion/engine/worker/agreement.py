# SPDX-License-Identifier: Apache-2.0
"""Keeps the ranks of an engine consistent when one of them fails.

All ranks run the same code on their hosts. After each call that may fail, they compare outcomes and
continue in the same way: if the call fails on one rank, it counts as failed on all ranks, so its
requests end everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vllm.diffusion.core.errors import RankError, RankMemoryError
from vllm.diffusion.memory import OUT_OF_MEMORY
from vllm.diffusion.parallel.host_board import FAILED, NO_MEMORY, NUMBER, WELL

if TYPE_CHECKING:
    from vllm.diffusion.parallel.host_board import HostBoard

_CODE_BITS = 2
_CODE = (1 << _CODE_BITS) - 1


class Barrier(Protocol):
    """A point within a step at which ranks wait for each other."""

    @property
    def can_reset(self) -> bool:
        """Whether ranks can continue after one of them has left the others waiting."""

    def stop_waiting(self) -> None:
        """Announce to waiting ranks that this rank has failed and makes no more calls."""

    def reset(self) -> None:
        """Discard calls that only some ranks have made; every rank must call this."""


class Agreement:
    """Agreement of all ranks on the outcome of a call; a single rank needs no agreement.

    Args:
        barriers: groups in which ranks of the same steps wait for each other; none for a single
            rank.
        board: counters shared by all ranks if they are on one host. Without it an error ends the
            engine, because other ranks wait for this rank.
    """

    def __init__(self, *barriers: Barrier, board: HostBoard | None = None) -> None:
        self._barriers, self._board = barriers, board

    def reach(self, error: Exception | None) -> Exception | None:
        """Return this rank's error, or a stand-in for another's; None if all ranks succeeded.

        Raises:
            Exception: this rank's error, if the other ranks could not continue.
        """
        if not self._barriers:
            return error
        if self._board is None or not all(barrier.can_reset for barrier in self._barriers):
            if error is not None:
                raise error
            return None
        if error is not None:
            for barrier in self._barriers:
                barrier.stop_waiting()
        worst = _worst(self._board, _code_of(error))
        if worst == WELL:
            return None
        for barrier in self._barriers:
            barrier.reset()
        if error is not None and _code_of(error) == worst:
            return error
        if worst == NO_MEMORY:
            return RankMemoryError("another rank has no memory for it")
        return RankError("another rank failed")

    def all_reduce_max(self, number: int) -> int:
        """Return the largest number that any rank passes.

        Raises:
            RankError: another rank has failed.
        """
        if self._board is None:
            return number
        words = self._board.exchange(number << _CODE_BITS | NUMBER)
        if any(word & _CODE != NUMBER for word in words):
            raise RankError("another rank failed")
        return max(words) >> _CODE_BITS


def _worst(board: HostBoard, code: int) -> int:
    """Return the worst code of any rank, after all calls of `all_reduce_max` have ended."""
    while True:
        codes = board.exchange(code)
        if all(other & _CODE != NUMBER for other in codes):
            return max(codes)


def _code_of(error: Exception | None) -> int:
    if error is None:
        return WELL
    return NO_MEMORY if isinstance(error, OUT_OF_MEMORY) else FAILED

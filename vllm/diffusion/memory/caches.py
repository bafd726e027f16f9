# SPDX-License-Identifier: Apache-2.0
"""Keys and values that requests keep from one denoise step to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.diffusion.memory.activation_pool import PoolExhaustedError

if TYPE_CHECKING:
    from vllm.diffusion.memory.activation_pool import ActivationPool


@dataclass
class CacheRange:
    """Where a sequence's keys and values lie in the pool; the pool may move them between steps.

    Attributes:
        start: the pool's row of position 0.
        length: positions.
    """

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class CachePool:
    """The keys and values of all requests that keep them, in one buffer.

    Every sequence has a range of consecutive rows, so that one launch can attend to the caches of
    many requests. The buffer grows when the ranges do not fit, and ranges move together when only
    the gaps between them are in the way.

    Args:
        num_layers, num_kv_heads, head_dim: L, KV and hd of the model on this rank.
        dtype: the model dtype.
        pool: where the memory comes from.

    Attributes:
        generation: counts how often the buffer has moved; addresses of an older one are stale.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        pool: ActivationPool,
    ) -> None:
        self._row_shape = (num_layers, 2, num_kv_heads, head_dim)
        self._dtype, self._pool = dtype, pool
        self._rows = self._new_rows(0)
        self._ranges: dict[str, CacheRange] = {}
        self.generation = 0

    def keys(self, layer: int) -> torch.Tensor:
        """[N, KV, hd]: the keys of a layer after rotation, model dtype; rows are strided."""
        return self._rows[:, layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[N, KV, hd]: the values of a layer, model dtype; rows are strided."""
        return self._rows[:, layer, 1]

    def allocate(self, req_id: str, length: int) -> CacheRange:
        """Rows for a request of `length` positions, not initialised.

        Raises:
            PoolExhaustedError: the pool has no room for them.
        """
        start = self._find_gap(length)
        if start is None:
            self._close_gaps()
            start = self.used_rows
            self._reserve(start + length)
        self._ranges[req_id] = CacheRange(start, length)
        return self._ranges[req_id]

    def release(self, req_id: str) -> None:
        """Give back the rows of a request, if it has some."""
        self._ranges.pop(req_id, None)

    def trim(self) -> None:
        """Give back the memory of rows that nobody uses."""
        if self.used_rows < len(self._rows):
            self._close_gaps()
            self._move_to(self.used_rows)

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def used_rows(self) -> int:
        return sum(taken.length for taken in self._ranges.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows in use."""
        return self.used_rows * self._row_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffer."""
        return len(self._rows) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return int(torch.Size(self._row_shape).numel() * self._rows.element_size())

    def _in_order(self) -> list[CacheRange]:
        return sorted(self._ranges.values(), key=lambda taken: taken.start)

    def _find_gap(self, length: int) -> int | None:
        """The first row of the first gap that is wide enough."""
        start = 0
        for taken in self._in_order():
            if taken.start - start >= length:
                return start
            start = taken.end
        return start if len(self._rows) - start >= length else None

    def _close_gaps(self) -> None:
        """Move the ranges to the front, in their order."""
        start = 0
        for taken in self._in_order():
            self._move(taken, start)
            start = taken.end

    def _move(self, taken: CacheRange, start: int) -> None:
        """Copy a range towards the front, in pieces that do not overlap their targets."""
        distance = taken.start - start
        for done in range(0, taken.length if distance else 0, max(distance, 1)):
            count = min(distance, taken.length - done)
            source = self._rows[taken.start + done : taken.start + done + count]
            self._rows[start + done : start + done + count].copy_(source)
        taken.start = start

    def _reserve(self, num_rows: int) -> None:
        """Let the buffer hold at least `num_rows`; it at least doubles, so that it moves rarely."""
        if num_rows <= len(self._rows):
            return
        try:
            self._move_to(max(num_rows, 2 * len(self._rows)))
        except (PoolExhaustedError, torch.OutOfMemoryError):
            self._move_to(num_rows)

    def _move_to(self, num_rows: int) -> None:
        """Let a new buffer of so many rows, the first of which are in use, replace the old one."""
        used, rows = self.used_rows, self._new_rows(num_rows)
        rows[:used].copy_(self._rows[:used])
        self._rows = rows
        self.generation += 1

    def _new_rows(self, num_rows: int) -> torch.Tensor:
        return self._pool.keep("caches", (num_rows, *self._row_shape), self._dtype)

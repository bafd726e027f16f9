# SPDX-License-Identifier: Apache-2.0
"""Keys and values that requests keep from one denoise step to the next, in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.memory.activation_pool import PoolExhaustedError
from vllm.diffusion.pages import PAGE_SIZE, num_pages
from vllm.diffusion.spans import PageTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.memory.activation_pool import ActivationPool
    from vllm.diffusion.ops import Array


@dataclass
class KeptSequence:
    """Where a sequence's keys and values lie; the store may change it between steps.

    Attributes:
        length: positions that have a place.
        pages: [ceil(length / PAGE_SIZE)] int64, in the order of the positions.
        slots: [length] int64, the store's row of every position.
        start: position 0 by the store's table, where the page of entry e holds the positions
            e * PAGE_SIZE to (e + 1) * PAGE_SIZE.
    """

    length: int
    pages: Array
    slots: Array
    start: int

    @property
    def keys(self) -> slice:
        """All positions by the store's table."""
        return slice(self.start, self.start + self.length)


class PageStore:
    """The keys and values of all requests that keep them, in one buffer of equal pages.

    A page holds PAGE_SIZE consecutive positions of one sequence, in all layers. Within a page the
    keys of a layer lie side by side, then its values, then the next layer's: a row of the buffer
    is one position's keys or values of one layer. A sequence's pages lie anywhere; a table on the
    device names them, so that one launch can attend to the keys of many requests.

    The store itself gives pages to requests that keep all their positions (`allocate`), and grows
    when too few are free. Or it has a fixed number of pages (`fix`), and somebody else says who has
    which (`assign`): then several requests may have the same page.

    Args:
        num_layers, num_kv_heads, head_dim: L, KV and hd of the model on this rank.
        dtype: the model dtype.
        pool: where the memory comes from.

    Attributes:
        generation: counts how often the pages have moved; addresses and slots of an older one are
            stale.
        table: the row of the first key of every page in use, sequence after sequence; never written
            again, but replaced when requests get pages.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        pool: ActivationPool,
    ) -> None:
        self._page_rows = 2 * num_layers * PAGE_SIZE
        self._row_shape = (num_kv_heads, head_dim)
        self._dtype, self._pool = dtype, pool
        self._sequences: dict[str, KeptSequence] = {}
        self._free: list[int] = []  # the next to be given is the last
        self._num_pages = 0
        self._most_entries: int | None = None
        self._rows = self._new_rows(0)
        self.table = PageTable(torch.empty(0, dtype=torch.int32, device=self.device), PAGE_SIZE)
        self.generation = 0

    def keys(self, layer: int) -> torch.Tensor:
        """[N, KV, hd]: the rows of a layer's keys after rotation, model dtype.

        Only rows that slots or the table name are the layer's.
        """
        return self._rows_from(2 * layer * PAGE_SIZE)

    def values(self, layer: int) -> torch.Tensor:
        """[N, KV, hd]: the rows of a layer's values; else as `keys`."""
        return self._rows_from((2 * layer + 1) * PAGE_SIZE)

    def allocate(self, req_id: str, length: int) -> KeptSequence:
        """Pages for a request of `length` positions, in place of what it had, not initialised.

        Raises:
            PoolExhaustedError: the pool has no room for them.
        """
        self.release(req_id)
        wanted = num_pages(length)
        missing = wanted - len(self._free)
        if missing > 0:
            self._grow(missing)
        pages = np.array([self._free.pop() for _ in range(wanted)], dtype=np.int64)
        kept = KeptSequence(length, pages, self._slots(pages, length), 0)
        self._sequences[req_id] = kept
        self.renew_table()
        return kept

    def fix(self, num_pages: int, most_entries: int) -> None:
        """Have so many pages from now on; `assign` names them from 0 on.

        Args:
            num_pages: in place of those that the store has had.
            most_entries: pages of all requests together, a page counted once for each of them.

        Raises:
            PoolExhaustedError: the pool has no room for them.
        """
        self._sequences.clear()
        self._move_to(num_pages)
        self._free, self._most_entries = [], most_entries

    def kept(self, req_id: str) -> KeptSequence | None:
        """Where a request's keys and values lie, if it has pages."""
        return self._sequences.get(req_id)

    def assign(self, req_id: str, pages: Sequence[int], *, behind: bool = False) -> None:
        """Pages of a fixed store for a request; `renew_table` must follow before they are read.

        Args:
            req_id: the request.
            pages: their numbers.
            behind: they come behind those that it has, not in their place.
        """
        had = self._sequences.get(req_id) if behind else None
        if had is None:
            self.release(req_id)
        if not pages:
            return
        new = np.array(pages, dtype=np.int64)
        slots = self._slots(new, len(new) * PAGE_SIZE)
        if had is not None:
            new, slots = np.concatenate([had.pages, new]), np.concatenate([had.slots, slots])
        self._sequences[req_id] = KeptSequence(len(slots), new, slots, start=0)

    def renew_table(self) -> None:
        """Name the pages of all sequences; steps that are under way have the table before."""
        if not self._sequences:
            return
        start, pages = 0, []
        for kept in self._sequences.values():
            kept.start = start
            start += len(kept.pages) * PAGE_SIZE
            pages.append(kept.pages)
        rows = (np.concatenate(pages) * self._page_rows).astype(np.int32)
        self.table = PageTable(ops.to_device(rows, self.device), PAGE_SIZE)

    def release(self, req_id: str) -> None:
        """Give back the pages of a request, if it has some."""
        kept = self._sequences.pop(req_id, None)
        if kept is not None and not self.is_fixed:
            self._free += kept.pages[::-1].tolist()

    def trim(self) -> None:
        """Give back the memory of pages that nobody uses; the others move together."""
        if self._free:
            self._move_to(self.used_pages)
            self.renew_table()

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def is_fixed(self) -> bool:
        """Whether pages are assigned, not allocated."""
        return self._most_entries is not None

    @property
    def reserved_pages(self) -> int:
        """Pages of the buffer."""
        return self._num_pages

    @property
    def most_entries(self) -> int:
        """Entries that the table may have before the pages move."""
        return self._num_pages if self._most_entries is None else self._most_entries

    @property
    def used_pages(self) -> int:
        return self._num_pages - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages in use; of a fixed store, of all."""
        return self.used_pages * self._page_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffer."""
        return self._num_pages * self._page_bytes

    @property
    def unused_bytes(self) -> int:
        """Of these, what `trim` gives back."""
        return len(self._free) * self._page_bytes

    @property
    def fixed_bytes(self) -> int:
        """Of these, what is never given back."""
        return self.reserved_bytes if self.is_fixed else 0

    @property
    def _page_bytes(self) -> int:
        row = torch.Size(self._row_shape).numel() * self._dtype.itemsize
        return int(self._page_rows * row)

    def _rows_from(self, first: int) -> torch.Tensor:
        """The buffer's rows from `first` on, as many for every layer's keys and values."""
        return self._rows[first : first + max(len(self._rows) - self._page_rows + PAGE_SIZE, 0)]

    def _slots(self, pages: Array, length: int) -> Array:
        rows: Array = pages[:, None] * self._page_rows + np.arange(PAGE_SIZE)
        return rows.reshape(-1)[:length]

    def _grow(self, missing: int) -> None:
        """Free so many more pages; the buffer at least doubles, so that it moves rarely."""
        wanted = self._num_pages + missing
        try:
            self._move_to(max(wanted, 2 * self._num_pages))
        except (PoolExhaustedError, torch.OutOfMemoryError):
            self._move_to(wanted)

    def _move_to(self, count: int) -> None:
        """Let a new buffer of `count` pages replace the old one, those in use first."""
        rows = self._new_rows(count)
        number = 0
        for kept in self._sequences.values():
            moved = np.arange(number, number + len(kept.pages), dtype=np.int64)
            number += len(moved)
            for source, target in zip(kept.pages.tolist(), moved.tolist(), strict=True):
                self._page(rows, target).copy_(self._page(self._rows, source))
            kept.pages, kept.slots = moved, self._slots(moved, kept.length)
        self._free = list(range(number, count))[::-1]
        self._num_pages, self._rows = count, rows
        self.generation += 1

    def _page(self, rows: torch.Tensor, number: int) -> torch.Tensor:
        return rows[number * self._page_rows : (number + 1) * self._page_rows]

    def _new_rows(self, count: int) -> torch.Tensor:
        """The rows of so many pages."""
        shape = (count * self._page_rows, *self._row_shape)
        return self._pool.keep("kept keys and values", shape, self._dtype)

# SPDX-License-Identifier: Apache-2.0
"""Which request has which pages of the store."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.pages import PAGE_ROWS, PAGE_SIZE, num_pages
from vllm.diffusion.core.spans import PageTable
from vllm.diffusion.memory.activation_pool import PoolExhaustedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.memory.activation_pool import ActivationPool
    from vllm.diffusion.memory.page_store import PageStore
    from vllm.diffusion.ops import Array


MAX_SHARE_WITH_DRAFTS = 0.25  # share of the pool that pages may take with draft pages


@dataclass
class KeptSequence:
    """Location of a sequence's keys and values; the store may change it between steps.

    Attributes:
        length: positions that have a place.
        pages: [ceil(length / PAGE_SIZE)] int64, in the order of the positions.
        slots: [length] int64, the store's row of every position.
        start: index of position 0 by the store's table, where the page of entry e holds the
            positions e * PAGE_SIZE to (e + 1) * PAGE_SIZE.
    """

    length: int
    pages: Array
    slots: Array
    start: int

    @property
    def keys(self) -> slice:
        """Indices of all positions by the store's table."""
        return slice(self.start, self.start + self.length)


class PageAllocator:
    """Gives the pages of a store to requests.

    It decides itself for requests that keep all their positions (`allocate`), and lets the store
    grow when too few pages are free. Or the store has a fixed number of pages (`fix`), and the
    scheduler decides who has which (`assign`): then several requests may have the same page.

    Args:
        store: the pages.
        pool: memory that the store has its pages in.
    """

    def __init__(self, store: PageStore, pool: ActivationPool) -> None:
        self.store, self._pool = store, pool
        self._sequences: dict[str, KeptSequence] = {}
        self._holders = Counter[int]()  # of pages that are not free: how many requests have them
        self._scratch: dict[str, list[int]] = {}  # pages beside the assigned ones, by place
        self._is_fixed = False

    def allocate(self, req_id: str, length: int, host_layers: int = 0) -> KeptSequence:
        """Give a request uninitialised pages for `length` positions, replacing those it had.

        Args:
            req_id: the request.
            length: positions.
            host_layers: number of layers whose pages lie in host memory; equal for all requests.

        Raises:
            PoolExhaustedError: the pool has no room for them.
            torch.OutOfMemoryError: the host has none.
        """
        self.release(req_id)
        if host_layers != self.store.host_layers:
            if self._sequences:
                raise RuntimeError(
                    f"page store: host_layers: wanted {self.store.host_layers}, as other requests "
                    f"have, given {host_layers}"
                )
            self.store.reset(host_layers)
        wanted = num_pages(length)
        self._provide(wanted)
        self.store.take_host_memory()
        pages = np.array([self.store.free.pop() for _ in range(wanted)], dtype=np.int64)
        kept = self._hold(req_id, length, pages)
        self.update_table()
        return kept

    def share(self, req_id: str, owner: str, length: int, shared: Sequence[range]) -> KeptSequence:
        """Give a request pages, and let it read what another one keeps at some positions.

        Pages that hold only these positions are shared; pages that hold others, too, are copied.
        The remaining pages are not initialised.

        Args:
            req_id: the request.
            owner: the other one; it writes none of these positions any more.
            length: positions.
            shared: positions that it reads.

        Raises:
            PoolExhaustedError: as `allocate`.
        """
        is_shared = np.zeros(num_pages(length) * PAGE_SIZE, dtype=bool)
        for positions in shared:
            is_shared[positions.start : positions.stop] = True
        (kept,) = self._share([req_id], owner, length, is_shared)
        return kept

    def allocate_drafts(
        self, owner: str, written: Sequence[range], names: Sequence[str], *, can_grow: bool = True
    ) -> list[KeptSequence]:
        """Give drafts the pages of a request, with pages of their own at some positions.

        Rows of these pages at other positions are copies of the rows that the request keeps now.

        Args:
            owner: the request.
            written: positions that drafts write.
            names: names of the drafts, by which `release` finds their pages.
            can_grow: whether the store may grow for drafts. If not, free pages are used, which are
                the same on all ranks, and nothing is raised.

        Returns:
            the sequences of the first names; fewer if more would take a part of the pool that steps
            need.

        Raises:
            PoolExhaustedError: as `allocate`.
        """
        kept, store = self._sequences[owner], self.store
        is_shared = np.ones(len(kept.pages) * PAGE_SIZE, dtype=bool)
        for positions in written:
            is_shared[positions.start : positions.stop] = False
        pages_each = int(np.count_nonzero(~is_shared.reshape(-1, PAGE_SIZE).all(axis=1)))
        room = len(store.free)
        if can_grow and not self._is_fixed:
            max_pages = int(MAX_SHARE_WITH_DRAFTS * self._pool.budget_bytes) // store.page_bytes
            room = max(room, max_pages - store.num_pages + room)
        names = names[: room // pages_each]
        drafts = self._share(names, owner, kept.length, is_shared)
        if self._is_fixed:
            for name, draft in zip(names, drafts, strict=True):
                self._scratch[name] = draft.pages[draft.pages != kept.pages].tolist()
        return drafts

    def refresh_drafts(self, owner: str, names: Sequence[str]) -> None:
        """Copy a request's rows to draft pages, at positions that drafts do not write."""
        kept = self._sequences[owner].pages
        for name in names:
            pages = self._sequences[name].pages
            is_own = pages != kept
            self.store.copy(kept[is_own].tolist(), pages[is_own].tolist())

    def _share(
        self, names: Sequence[str], owner: str, length: int, is_shared: Array
    ) -> list[KeptSequence]:
        """Give each of `names` the pages of the owner that hold shared positions alone."""
        by_page = is_shared.reshape(-1, PAGE_SIZE)
        own_pages = np.flatnonzero(~by_page.all(axis=1))
        copied = own_pages[by_page[own_pages].any(axis=1)]
        self._provide(len(own_pages) * len(names))  # pages of the owner may move
        shares = []
        for name in names:
            pages = self._sequences[owner].pages[: len(by_page)].copy()
            sources = pages[copied]
            pages[own_pages] = [self.store.free.pop() for _ in own_pages]
            self.store.copy(sources.tolist(), pages[copied].tolist())
            shares.append(self._hold(name, length, pages))
        self.update_table()
        return shares

    def copy(self, req_id: str, owner: str) -> None:
        """Copy everything that a request of equal length keeps now to this one's pages."""
        sources, targets = self._sequences[owner].pages, self._sequences[req_id].pages
        self.store.copy(sources.tolist(), targets.tolist())

    def _hold(self, req_id: str, length: int, pages: Array) -> KeptSequence:
        kept = KeptSequence(length, pages, _slots(pages, length), 0)
        self._sequences[req_id] = kept
        if not self._is_fixed:
            self._holders.update(pages.tolist())
        return kept

    def provide(self, positions: int) -> None:
        """Have free pages for so many positions, as far as the pool has room for them at once.

        Requests then begin without the pages of others moving. `trim` gives them back.
        """
        if not self._is_fixed:
            with suppress(PoolExhaustedError, torch.OutOfMemoryError):
                self._provide(num_pages(positions))

    def fix(self, num_pages: int, most_entries: int, scratch: int = 0) -> None:
        """Replace all pages by a fixed number of them; `assign` names them from 0 on.

        Args:
            num_pages: number of pages.
            scratch: further pages, for drafts.
            most_entries: pages of all requests together, a page counted once for each of them.

        Raises:
            PoolExhaustedError: the pool has no room for them.
        """
        self._sequences.clear()
        self.store.resize(num_pages + scratch)
        self.store.free = list(range(num_pages, num_pages + scratch))
        self.store.most_entries, self._is_fixed = most_entries, True

    def assign(
        self, req_id: str, pages: Sequence[int], *, behind: bool = False
    ) -> KeptSequence | None:
        """Give a request pages of a fixed store; call `update_table` before they are read.

        Args:
            req_id: the request.
            pages: their numbers.
            behind: whether they extend those that it has, instead of replacing them.

        Returns:
            the location of its keys and values; None if it has no pages.
        """
        had = self._sequences.get(req_id) if behind else None
        if had is None:
            self.release(req_id)
        if not pages:
            return had
        new = np.array(pages, dtype=np.int64)
        slots = _slots(new, len(new) * PAGE_SIZE)
        if had is not None:
            new, slots = np.concatenate([had.pages, new]), np.concatenate([had.slots, slots])
        kept = self._sequences[req_id] = KeptSequence(len(slots), new, slots, start=0)
        return kept

    def holds(self, req_id: str) -> bool:
        """Whether a request has pages."""
        return req_id in self._sequences

    def update_table(self) -> None:
        """Name the pages of all sequences; steps under way have the table before."""
        if not self._sequences:
            return
        start, pages = 0, []
        for kept in self._sequences.values():
            kept.start = start
            start += len(kept.pages) * PAGE_SIZE
            pages.append(kept.pages)
        rows = (np.concatenate(pages) * PAGE_ROWS).astype(np.int32)
        self.store.take_entries(len(rows))
        self.store.table = PageTable(ops.to_device(rows, self.store.device), PAGE_SIZE)

    def release(self, req_id: str) -> None:
        """Give back the pages of a request, if it has some."""
        kept = self._sequences.pop(req_id, None)
        self.store.free += self._scratch.pop(req_id, [])
        if kept is None or self._is_fixed:
            return
        self._holders.subtract(kept.pages.tolist())
        self.store.free += [p for p in kept.pages[::-1].tolist() if not self._holders[p]]
        is_large = 2 * self.store.reserved_bytes > self._pool.budget_bytes
        if not self._sequences and (is_large or self.store.host_layers):
            self.store.reset(host_layers=0)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the buffer that are never given back."""
        return self.store.reserved_bytes if self._is_fixed else 0

    # ---- more pages, and fewer ----

    def trim(self) -> None:
        """Give back the memory of unused pages; the others move together."""
        if not self.unused_bytes:
            return
        self._move_to_front()
        try:
            self.store.resize(self.store.num_pages - len(self.store.free))
        finally:
            self.update_table()

    @property
    def unused_bytes(self) -> int:
        """Bytes that `trim` gives back."""
        cannot_move = self._is_fixed or self.store.host_layers > 0
        return 0 if cannot_move else self.store.reserved_bytes - self.store.num_bytes

    def _provide(self, wanted: int) -> None:
        """Have `wanted` free pages; the store grows by more, so that pages move rarely."""
        store, missing = self.store, wanted - len(self.store.free)
        if missing <= 0:
            return
        needed, doubled = store.num_pages + missing, 2 * store.num_pages
        if not self._sequences:
            store.resize(0)  # nothing to move: what there was goes first
        may_double = 2 * doubled * store.page_bytes <= self._pool.budget_bytes
        larger = doubled if may_double else store.num_pages * 5 // 4
        for count in (larger, needed) if larger > needed else (needed,):
            with suppress(PoolExhaustedError, torch.OutOfMemoryError):
                store.resize(count)
                return
        self.trim()  # free pages need not be there twice
        store.resize(store.num_pages - len(store.free) + wanted)

    def _move_to_front(self) -> None:
        """Let free pages be the last ones: pages behind those that stay move to free ones."""
        store = self.store
        count = store.num_pages - len(store.free)
        sources = [page for page in +self._holders if page >= count]
        targets = [page for page in store.free if page < count]
        store.copy(sources, targets)
        store.free = list(range(count, store.num_pages))[::-1]
        store.generation += 1
        moved = np.arange(store.num_pages)
        moved[sources] = targets
        for kept in self._sequences.values():
            kept.pages = moved[kept.pages]
            kept.slots = _slots(kept.pages, kept.length)
        self._holders = Counter(
            page for kept in self._sequences.values() for page in kept.pages.tolist()
        )


def _slots(pages: Array, length: int) -> Array:
    """Rows of the store of the first `length` positions of a sequence in these pages."""
    rows: Array = pages[:, None] * PAGE_ROWS + np.arange(PAGE_SIZE)
    return rows.reshape(-1)[:length]

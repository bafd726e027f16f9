# SPDX-License-Identifier: Apache-2.0
"""Assigns the pages of the store to requests."""

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
from vllm.diffusion.memory.windowed_store import WindowedPageStore

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
        length: number of positions that have a slot.
        pages: [ceil(length / PAGE_SIZE)] int64, in the order of the positions.
        slots: [length] int64, row of the store for every position.
        start: index of position 0 in the store's table; the page of entry e holds the positions e *
            PAGE_SIZE to (e + 1) * PAGE_SIZE.
        window_pages, window_slots: the same for layers with a window; negative for positions
            without a page. None if all layers have the same pages.
    """

    length: int
    pages: Array
    slots: Array
    start: int
    window_pages: Array | None = None
    window_slots: Array | None = None

    @property
    def keys(self) -> slice:
        """Indices of all positions in the store's table."""
        return slice(self.start, self.start + self.length)


class PageAllocator:
    """Assigns the pages of a store to requests.

    In full-attention families it chooses the pages itself (`allocate`), and grows the store if too
    few pages are free. In block-causal families the store has a fixed number of pages (`fix`), and
    the scheduler assigns them (`assign`); then several requests may share a page.

    Args:
        store: the pages.
        pool: memory in which the store allocates its pages.

    Attributes:
        fixed_sizes: the arguments of `fix`; None if it was not called.
    """

    def __init__(self, store: PageStore, pool: ActivationPool) -> None:
        self.store, self._pool = store, pool
        self._sequences: dict[str, KeptSequence] = {}
        # Number of requests that have each page, for pages that are not free.
        self._holders = Counter[int]()
        self._scratch: dict[str, list[int]] = {}  # pages of each draft, in a fixed store
        self.fixed_sizes: tuple[int, int, int, int] | None = None

    def allocate(self, req_id: str, length: int, host_layers: int = 0) -> KeptSequence:
        """Give a request uninitialised pages for `length` positions, replacing its previous pages.

        Args:
            req_id: ID of the request.
            length: number of positions.
            host_layers: number of layers whose pages are in host memory; equal for all requests.

        Raises:
            PoolExhaustedError: the pool has no memory for them.
            torch.OutOfMemoryError: the host has no memory for them.
        """
        self.release(req_id)
        if host_layers != self.store.host_layers:
            if self._sequences:
                raise RuntimeError(
                    f"page store: host_layers: wanted {self.store.host_layers}, as other requests "
                    f"have, given {host_layers}"
                )
            self.store.reset(host_layers)
        count = num_pages(length)
        self._provide(count)
        self.store.take_host_memory()
        pages = np.array([self.store.free.pop() for _ in range(count)], dtype=np.int64)
        kept = self._hold(req_id, length, pages)
        self.update_table()
        return kept

    def share(self, req_id: str, owner: str, length: int, shared: Sequence[range]) -> KeptSequence:
        """Give a request pages, and share some positions with another request.

        Pages that contain only shared positions are shared; pages that also contain other positions
        are copied. All other pages are uninitialised.

        Args:
            req_id: ID of the request.
            owner: the other request; it must not write the shared positions any more.
            length: number of positions.
            shared: shared positions.

        Raises:
            PoolExhaustedError: as for `allocate`.
        """
        is_shared = np.zeros(num_pages(length) * PAGE_SIZE, dtype=bool)
        for positions in shared:
            is_shared[positions.start : positions.stop] = True
        (kept,) = self._share([req_id], owner, length, is_shared)
        return kept

    def allocate_drafts(
        self, owner: str, written: Sequence[range], names: Sequence[str], *, can_grow: bool = True
    ) -> list[KeptSequence]:
        """Give drafts the pages of a request, with separate pages for some positions.

        Rows of the separate pages at other positions are copies of the request's current rows.

        Args:
            owner: the request.
            written: positions that drafts write.
            names: names of the drafts, by which `release` finds their pages.
            can_grow: whether the store may grow for drafts. If not, only free pages are used, which
                are the same on all ranks, and no error is raised.

        Returns:
            the sequences of `names`, or of the first names if there are too few pages: drafts never
            take memory of the pool that steps need.

        Raises:
            PoolExhaustedError: as for `allocate`.
        """
        kept, store = self._sequences[owner], self.store
        is_shared = np.ones(len(kept.pages) * PAGE_SIZE, dtype=bool)
        for positions in written:
            is_shared[positions.start : positions.stop] = False
        pages_each = int(np.count_nonzero(~is_shared.reshape(-1, PAGE_SIZE).all(axis=1)))
        room = len(store.free)
        if can_grow and not self.is_fixed:
            max_pages = int(MAX_SHARE_WITH_DRAFTS * self._pool.budget_bytes) // store.page_bytes
            room = max(room, max_pages - store.num_pages + room)
        names = names[: room // pages_each]
        drafts = self._share(names, owner, kept.length, is_shared)
        if self.is_fixed:
            for name, draft in zip(names, drafts, strict=True):
                self._scratch[name] = draft.pages[draft.pages != kept.pages].tolist()
        return drafts

    def refresh_drafts(self, owner: str, names: Sequence[str]) -> None:
        """Copy a request's rows to its draft pages, at positions that drafts do not write."""
        kept = self._sequences[owner].pages
        for name in names:
            pages = self._sequences[name].pages
            is_own = pages != kept
            self.store.copy(kept[is_own].tolist(), pages[is_own].tolist())
            self._copy_windows(self._sequences[owner], self._sequences[name], is_own)

    def _share(
        self, names: Sequence[str], owner: str, length: int, is_shared: Array
    ) -> list[KeptSequence]:
        """Give each of `names` the owner's pages that contain only shared positions."""
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
            self._share_windows(self._sequences[owner], shares[-1], own_pages, copied)
        self.update_table()
        return shares

    def _share_windows(
        self, owner: KeptSequence, draft: KeptSequence, own_pages: Array, copied: Array
    ) -> None:
        """Give a draft window pages: the owner's, and one for each of its own pages."""
        if owner.window_pages is None or self.fixed_sizes is None:
            return
        num_pages, _, _, num_window_pages = self.fixed_sizes
        draft.window_pages = owner.window_pages[: len(draft.pages)].copy()
        draft.window_pages[own_pages] = num_window_pages + draft.pages[own_pages] - num_pages
        draft.window_slots = _slots(draft.window_pages, draft.length)
        self._copy_windows(owner, draft, copied)

    def _copy_windows(self, owner: KeptSequence, draft: KeptSequence, indices: Array) -> None:
        """Copy window pages of a request to its draft; `indices` select pages of the sequence."""
        store = self.store
        if owner.window_pages is None or draft.window_pages is None:
            return
        assert isinstance(store, WindowedPageStore)
        sources, targets = owner.window_pages[indices], draft.window_pages[indices]
        store.windows.copy(sources.tolist(), targets.tolist())

    def copy(self, req_id: str, owner: str) -> None:
        """Copy all cached rows of a request of equal length to this request's pages."""
        sources, targets = self._sequences[owner].pages, self._sequences[req_id].pages
        self.store.copy(sources.tolist(), targets.tolist())

    def _hold(self, req_id: str, length: int, pages: Array) -> KeptSequence:
        kept = KeptSequence(length, pages, _slots(pages, length), 0)
        self._sequences[req_id] = kept
        if not self.is_fixed:
            self._holders.update(pages.tolist())
        return kept

    def provide(self, positions: int) -> None:
        """Ensure free pages for `positions` positions, if the pool has room for them at once.

        Requests can then start without moving the pages of others. `trim` releases the pages.
        """
        if not self.is_fixed:
            with suppress(PoolExhaustedError, torch.OutOfMemoryError):
                self._provide(num_pages(positions))

    def fix(
        self, num_pages: int, most_entries: int, scratch: int = 0, num_window_pages: int = 0
    ) -> None:
        """Replace all pages by a fixed number of pages; `assign` numbers them from 0.

        Args:
            num_pages: number of pages.
            most_entries: maximum pages of all requests together; a shared page counts for each of
                its requests.
            scratch: number of draft pages, in addition to `num_pages`.
            num_window_pages: number of pages for layers with a window, in addition to one for each
                draft page.

        Raises:
            PoolExhaustedError: the pool has no memory for them.
        """
        self._sequences.clear()
        if isinstance(self.store, WindowedPageStore):
            self.store.windows.resize(num_window_pages + scratch)
        self.store.resize(num_pages + scratch)
        self.store.free = list(range(num_pages, num_pages + scratch))
        self.store.most_entries = most_entries
        self.fixed_sizes = (num_pages, most_entries, scratch, num_window_pages)

    def assign(
        self,
        req_id: str,
        pages: Sequence[int],
        *,
        behind: bool = False,
        window_pages: Sequence[int] = (),
    ) -> KeptSequence | None:
        """Give a request pages of a fixed store; call `update_table` before they are read.

        Args:
            req_id: ID of the request.
            pages: page numbers.
            behind: whether they extend the request's pages instead of replacing them.
            window_pages: pages at the same positions for layers with a window, negative for none;
                empty if all layers have the same pages.

        Returns:
            the location of its keys and values; None if it has no pages.
        """
        previous = self._sequences.get(req_id) if behind else None
        if previous is None:
            self.release(req_id)
        if not pages:
            return previous
        kept = _kept(pages, window_pages)
        if previous is not None:
            kept = _joined(previous, kept)
        self._sequences[req_id] = kept
        return kept

    def holds(self, req_id: str) -> bool:
        """Whether a request has pages."""
        return req_id in self._sequences

    def update_table(self) -> None:
        """Write the pages of all sequences to a new table; steps in flight keep the old one."""
        if not self._sequences:
            return
        start, pages, window_pages = 0, [], []
        for kept in self._sequences.values():
            kept.start = start
            start += len(kept.pages) * PAGE_SIZE
            pages.append(kept.pages)
            if kept.window_pages is not None:
                window_pages.append(kept.window_pages)
        rows = [_first_rows(numbers) for numbers in (pages, window_pages) if numbers]
        self.store.take_entries(len(rows[0]))
        on_device = ops.to_device(tuple(rows), self.store.device)
        self.store.table = PageTable(on_device[0], PAGE_SIZE, *on_device[1:])

    def release(self, req_id: str) -> None:
        """Release the pages of a request, if it has some."""
        kept = self._sequences.pop(req_id, None)
        self.store.free += self._scratch.pop(req_id, [])
        if kept is None or self.is_fixed:
            return
        self._holders.subtract(kept.pages.tolist())
        self.store.free += [p for p in kept.pages[::-1].tolist() if not self._holders[p]]
        is_large = 2 * self.store.reserved_bytes > self._pool.budget_bytes
        if not self._sequences and (is_large or self.store.host_layers):
            self.store.reset(host_layers=0)

    @property
    def is_fixed(self) -> bool:
        """Whether the number of pages is fixed."""
        return self.fixed_sizes is not None

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the store that are never released."""
        return self.store.reserved_bytes if self.is_fixed else 0

    # ---- growing and shrinking ----

    def trim(self) -> None:
        """Release the memory of unused pages; all other pages move to the front."""
        if not self.unused_bytes:
            return
        self._move_to_front()
        try:
            self.store.resize(self.store.num_pages - len(self.store.free))
        finally:
            self.update_table()

    @property
    def unused_bytes(self) -> int:
        """Bytes that `trim` would release."""
        cannot_move = self.is_fixed or self.store.host_layers > 0
        return 0 if cannot_move else self.store.reserved_bytes - self.store.num_bytes

    def _provide(self, wanted: int) -> None:
        """Ensure `wanted` free pages; allocate more if possible, so that pages seldom move."""
        store, missing = self.store, wanted - len(self.store.free)
        if missing <= 0:
            return
        needed, doubled = store.num_pages + missing, 2 * store.num_pages
        if not self._sequences:
            store.resize(0)  # nothing must move, so release the old buffers first
        may_double = 2 * doubled * store.page_bytes <= self._pool.budget_bytes
        larger = doubled if may_double else store.num_pages * 5 // 4
        for count in (larger, needed) if larger > needed else (needed,):
            with suppress(PoolExhaustedError, torch.OutOfMemoryError):
                store.resize(count)
                return
        self.trim()  # release free pages first, so that they do not exist twice
        store.resize(store.num_pages - len(store.free) + wanted)

    def _move_to_front(self) -> None:
        """Compact: move used pages to the front."""
        store = self.store
        count = store.num_pages - len(store.free)
        sources = [page for page in +self._holders if page >= count]
        targets = [page for page in store.free if page < count]
        store.copy(sources, targets)
        store.free = list(range(count, store.num_pages))[::-1]
        store.layout_version += 1
        moved = np.arange(store.num_pages)
        moved[sources] = targets
        for kept in self._sequences.values():
            kept.pages = moved[kept.pages]
            kept.slots = _slots(kept.pages, kept.length)
        self._holders = Counter(
            page for kept in self._sequences.values() for page in kept.pages.tolist()
        )


def _slots(pages: Array, length: int) -> Array:
    """Return the store rows of the first `length` positions of a sequence in these pages."""
    rows: Array = pages[:, None] * PAGE_ROWS + np.arange(PAGE_SIZE)
    return rows.reshape(-1)[:length]


def _first_rows(pages: Sequence[Array]) -> Array:
    """Return the first store row [E] int32 of every page; entries without a page are 0."""
    rows: Array = (np.concatenate(pages).clip(min=0) * PAGE_ROWS).astype(np.int32)
    return rows


def _kept(pages: Sequence[int], window_pages: Sequence[int]) -> KeptSequence:
    """Return the location of a sequence in these pages, whose start is not known yet."""
    length = len(pages) * PAGE_SIZE
    own = np.array(pages, dtype=np.int64)
    kept = KeptSequence(length, own, _slots(own, length), start=0)
    if window_pages:
        kept.window_pages = np.array(window_pages, dtype=np.int64)
        kept.window_slots = _slots(kept.window_pages, length)
    return kept


def _joined(first: KeptSequence, later: KeptSequence) -> KeptSequence:
    """Return the location of a sequence whose pages follow one another."""
    joined = KeptSequence(
        first.length + later.length,
        np.concatenate([first.pages, later.pages]),
        np.concatenate([first.slots, later.slots]),
        start=0,
    )
    if first.window_pages is not None and later.window_pages is not None:
        joined.window_pages = np.concatenate([first.window_pages, later.window_pages])
        joined.window_slots = np.concatenate([first.window_slots, later.window_slots])
    return joined

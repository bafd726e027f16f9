# SPDX-License-Identifier: Apache-2.0
"""Keys and values that requests keep from one denoise step to the next, in pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.pages import PAGE_SIZE, num_pages
from vllm.diffusion.core.spans import PageTable
from vllm.diffusion.core.stages import NUM_STREAM_BUFFERS, device_layers
from vllm.diffusion.memory.activation_pool import PoolExhaustedError
from vllm.diffusion.memory.host import HostLayers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.memory.activation_pool import ActivationPool
    from vllm.diffusion.ops import Array


_PAGE_ROWS = 2 * PAGE_SIZE  # of one layer: keys, then values


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


class PageStore:
    """Keys and values of all requests that keep them, in one buffer of equal pages.

    A page holds PAGE_SIZE consecutive positions of one sequence, in all layers. The pages of one
    layer lie side by side, in each of them the keys, then the values: a row of the buffer is one
    position's keys or values of one layer. A sequence's pages lie anywhere; a table on the
    device names them, so that one launch can attend to the keys of many requests.

    The keys and values of the last layers may lie in host memory (`HostLayers`). Then a forward
    says when it turns to a layer.

    The store itself gives pages to requests that keep all their positions (`allocate`), and grows
    when too few are free. Or it has a fixed number of pages (`fix`), and the scheduler decides who
    has which (`assign`): then several requests may have the same page.

    Args:
        num_layers, num_kv_heads, head_dim: L, KV and hd of the model on this rank.
        dtype: the model dtype.
        pool: source of the memory.

    Attributes:
        host_layers: layers whose keys and values lie in host memory.
        generation: number of times that the pages have moved; addresses and slots of an older one
            are stale.
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
        self._num_layers, self.host_layers = num_layers, 0
        self._host: HostLayers | None = None
        self._row_shape = (num_kv_heads, head_dim)
        self._row_bytes = num_kv_heads * head_dim * dtype.itemsize
        self._dtype, self._pool = dtype, pool
        self._sequences: dict[str, KeptSequence] = {}
        self._free: list[int] = []  # the next to be given is the last
        self._holders = Counter[int]()  # of pages that are not free: how many requests have them
        self._num_pages = 0
        self._most_entries: int | None = None
        self._rows = self._new_rows(0)
        self.table = PageTable(torch.empty(0, dtype=torch.int32, device=self.device), PAGE_SIZE)
        self.generation = 0

    def keys(self, layer: int) -> torch.Tensor:
        """Rows of a layer's keys after rotation, [N, KV, hd] in the model dtype.

        Only rows named by slots or by the table belong to the layer.
        """
        return self._rows_of(layer)[: max(self._layer_rows - PAGE_SIZE, 0)]

    def values(self, layer: int) -> torch.Tensor:
        """Rows of a layer's values, [N, KV, hd]; else as `keys`."""
        return self._rows_of(layer)[PAGE_SIZE:]

    def allocate(
        self, req_id: str, length: int, host_layers: int = 0, spare: int = 0
    ) -> KeptSequence:
        """Give a request uninitialised pages for `length` positions, replacing those it had.

        Args:
            req_id: the request.
            length: positions.
            host_layers: number of layers whose pages lie in host memory; equal for all requests.
            spare: positions of free pages to provide besides, for `share`.

        Raises:
            PoolExhaustedError: the pool has no room for them.
            torch.OutOfMemoryError: the host has none.
        """
        self.release(req_id)
        if host_layers != self.host_layers:
            self._begin_anew(host_layers)
        wanted = num_pages(length)
        self._provide(wanted + num_pages(spare))
        if host_layers and self._host is None:
            self._host = HostLayers(host_layers, self._places())
        pages = np.array([self._free.pop() for _ in range(wanted)], dtype=np.int64)
        return self._hold(req_id, length, pages)

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
        by_page = is_shared.reshape(-1, PAGE_SIZE)
        own = np.flatnonzero(~by_page.all(axis=1))
        self._provide(len(own))  # pages of the owner may move
        pages = self._sequences[owner].pages[: len(by_page)].copy()
        copied = own[by_page[own].any(axis=1)]
        sources = pages[copied]
        pages[own] = [self._free.pop() for _ in own]
        self._copy(sources, pages[copied])
        return self._hold(req_id, length, pages)

    def copy(self, req_id: str, owner: str) -> None:
        """Copy everything that a request of equal length keeps now to this one's pages."""
        self._copy(self._sequences[owner].pages, self._sequences[req_id].pages)

    def _copy(self, sources: Array, targets: Array) -> None:
        """Copy pages [n] to pages [n], in all layers."""
        by_number = self._by_page(self._rows, self._num_pages)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            by_number[:, target].copy_(by_number[:, source])

    def _provide(self, wanted: int) -> None:
        """Have `wanted` free pages."""
        missing = wanted - len(self._free)
        if missing > 0:
            self._grow(missing)

    def _hold(self, req_id: str, length: int, pages: Array) -> KeptSequence:
        kept = KeptSequence(length, pages, self._slots(pages, length), 0)
        self._sequences[req_id] = kept
        self._holders.update(pages.tolist())
        self.renew_table()
        return kept

    def fix(self, num_pages: int, most_entries: int) -> None:
        """Replace all pages by a fixed number of them; `assign` names them from 0 on.

        Args:
            num_pages: number of pages.
            most_entries: pages of all requests together, a page counted once for each of them.

        Raises:
            PoolExhaustedError: the pool has no room for them.
        """
        self._sequences.clear()
        self._move_to(num_pages)
        self._free, self._most_entries = [], most_entries

    def kept(self, req_id: str) -> KeptSequence | None:
        """Return the location of a request's keys and values; None if it has no pages."""
        return self._sequences.get(req_id)

    def assign(self, req_id: str, pages: Sequence[int], *, behind: bool = False) -> None:
        """Give a request pages of a fixed store; call `renew_table` before they are read.

        Args:
            req_id: the request.
            pages: their numbers.
            behind: whether they extend those that it has, instead of replacing them.
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
        """Name the pages of all sequences; steps under way have the table before."""
        if not self._sequences:
            return
        start, pages = 0, []
        for kept in self._sequences.values():
            kept.start = start
            start += len(kept.pages) * PAGE_SIZE
            pages.append(kept.pages)
        rows = (np.concatenate(pages) * _PAGE_ROWS).astype(np.int32)
        self.table = PageTable(ops.to_device(rows, self.device), PAGE_SIZE)

    def release(self, req_id: str) -> None:
        """Give back the pages of a request, if it has some."""
        kept = self._sequences.pop(req_id, None)
        if kept is None or self.is_fixed:
            return
        self._holders.subtract(kept.pages.tolist())
        self._free += [page for page in kept.pages[::-1].tolist() if not self._holders[page]]
        if not self._sequences and self._is_large:
            self._begin_anew(host_layers=0)

    @property
    def _is_large(self) -> bool:
        """Whether the pages leave no room to move them, and so serve one request alone."""
        return self.host_layers > 0 or 2 * self.reserved_bytes > self._pool.budget_bytes

    @property
    def _cannot_move(self) -> bool:
        return self._is_large and bool(self._sequences)

    def _begin_anew(self, host_layers: int) -> None:
        """Begin again without pages; no request may have any."""
        if self._sequences:
            raise RuntimeError(
                f"page store: host_layers: wanted {self.host_layers}, as other requests have, "
                f"given {host_layers}"
            )
        if self._host is not None:
            self._host.close()
        self._move_to(0)
        self._host, self.host_layers = None, host_layers

    # ---- layers in host memory ----

    def begin_step(self, slots: Array, *, reads: bool) -> None:
        """Begin a forward, which visits the layers in order.

        Args:
            slots: [W] int64, rows that it writes; negative for none.
            reads: whether it reads rows that it does not write.
        """
        if self._host is None or not slots.size:
            return
        pages = np.unique(slots[slots >= 0] // _PAGE_ROWS)
        runs = np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1)
        written = [slice(int(p[0]) * _PAGE_ROWS, (int(p[-1]) + 1) * _PAGE_ROWS) for p in runs]
        self._host.begin(reads=reads, written=written)

    def turn_to(self, layer: int) -> None:
        """Make `keys` and `values` of a layer usable, and no longer those of others."""
        first = self._num_layers - self.host_layers
        if self._host is not None and layer >= first:
            self._host.turn_to(layer - first)

    def end_step(self) -> None:
        """End the forward, which uses no layer any more."""
        if self._host is not None:
            self._host.leave()

    def _places(self) -> list[torch.Tensor]:
        """Rows on the device where layers in host memory visit it."""
        first = self._num_layers - self.host_layers
        return [self._rows_of(first + index) for index in range(NUM_STREAM_BUFFERS)]

    def trim(self) -> None:
        """Give back the memory of unused pages; the others move together."""
        if self._free and not self._cannot_move:
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
        """Number of pages of the buffer."""
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
        """Bytes of the pages in use; in a fixed store, of all pages."""
        return self.used_pages * self.page_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffer."""
        return self._num_pages * self.page_bytes

    @property
    def unused_bytes(self) -> int:
        """Bytes of the buffer that `trim` gives back."""
        return 0 if self._cannot_move else len(self._free) * self.page_bytes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the buffer that are never given back."""
        return self.reserved_bytes if self.is_fixed else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return 0 if self._host is None else self._host.num_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on the device, in all layers that lie there."""
        return self._device_layers * _PAGE_ROWS * self._row_bytes

    @property
    def _device_layers(self) -> int:
        return device_layers(self._num_layers, self.host_layers)

    @property
    def _layer_rows(self) -> int:
        return self._num_pages * _PAGE_ROWS

    def _rows_of(self, layer: int) -> torch.Tensor:
        """Rows of a layer, or of the place where it visits the device."""
        beyond = layer - (self._num_layers - self.host_layers)
        if beyond >= 0:
            layer -= beyond - beyond % NUM_STREAM_BUFFERS
        return self._rows[layer * self._layer_rows : (layer + 1) * self._layer_rows]

    def _slots(self, pages: Array, length: int) -> Array:
        rows: Array = pages[:, None] * _PAGE_ROWS + np.arange(PAGE_SIZE)
        return rows.reshape(-1)[:length]

    def _grow(self, missing: int) -> None:
        """Get `missing` more free pages; the buffer at least doubles, so that it moves rarely."""
        wanted, doubled = self._num_pages + missing, 2 * self._num_pages
        if self._num_pages and not self._sequences:
            self._move_to(0)  # nothing to move: what there was goes first
        if doubled > wanted and 2 * doubled * self.page_bytes <= self._pool.budget_bytes:
            try:
                self._move_to(doubled)
                return
            except (PoolExhaustedError, torch.OutOfMemoryError):
                pass
        self._move_to(wanted)

    def _move_to(self, count: int) -> None:
        """Replace the buffer by one of `count` pages, those in use first."""
        rows = self._new_rows(count)
        targets, sources = self._by_page(rows, count), self._by_page(self._rows, self._num_pages)
        pages = [kept.pages for kept in self._sequences.values()]
        used = list(dict.fromkeys(np.concatenate(pages).tolist())) if pages else []
        moved = np.zeros(self._num_pages, dtype=np.int64)
        for target, source in enumerate(used):
            targets[:, target].copy_(sources[:, source])
            moved[source] = target
        for kept in self._sequences.values():
            kept.pages = moved[kept.pages]
            kept.slots = self._slots(kept.pages, kept.length)
        self._holders = Counter(
            page for kept in self._sequences.values() for page in kept.pages.tolist()
        )
        self._free = list(range(len(used), count))[::-1]
        self._num_pages, self._rows = count, rows
        self.generation += 1

    def _by_page(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """View of a buffer of `count` pages: [layers, pages, rows of a page, KV, hd]."""
        return rows.view(self._device_layers, count, _PAGE_ROWS, *self._row_shape)

    def _new_rows(self, count: int) -> torch.Tensor:
        """Allocate the rows of `count` pages."""
        shape = (self._device_layers * count * _PAGE_ROWS, *self._row_shape)
        return self._pool.keep("kept keys and values", shape, self._dtype)

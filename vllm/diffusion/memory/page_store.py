# SPDX-License-Identifier: Apache-2.0
"""Keys and values that requests keep from one denoise step to the next, in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.core.pages import PAGE_ROWS, PAGE_SIZE
from vllm.diffusion.core.spans import PageTable
from vllm.diffusion.core.stages import NUM_STREAM_BUFFERS, device_layers
from vllm.diffusion.memory.activation_pool import PoolExhaustedError
from vllm.diffusion.memory.host import HostLayers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.diffusion.memory.activation_pool import ActivationPool
    from vllm.diffusion.ops import Array


ENTRIES_PER_PAGE = 16  # of the table: a request's guesses read most of its pages, too


class PageStore:
    """Keys and values of all requests that keep them, in one buffer of equal pages.

    A page holds PAGE_SIZE consecutive positions of one sequence, in all layers. The pages of one
    layer lie side by side, in each of them the keys, then the values: a row of the buffer is one
    position's keys or values of one layer. A sequence's pages lie anywhere; a table on the
    device names them, so that one launch can attend to the keys of many requests.

    ```
    layer      0                          | 1                          | ...
    page       0            | 1           | 0            | 1           |
    rows       64 k | 64 v  | 64 k | 64 v | 64 k | 64 v  | 64 k | 64 v |
    ```

    A `PageAllocator` says which request has which pages.

    Args:
        num_layers, num_kv_heads, head_dim: L, KV and hd of the model on this rank.
        dtype: the model dtype.
        pool: source of the memory.

    Attributes:
        device: where the buffer lies.
        num_pages: pages of the buffer.
        reserved_bytes: bytes of the buffer.
        free: pages that nobody has; the next to be given is the last.
        host_layers: layers whose keys and values lie in host memory.
        generation: number of times that the pages or their table have moved; addresses and slots of
            an older one are stale.
        table: the row of the first key of every page in use, sequence after sequence; never written
            again, but replaced when requests get pages.
        most_entries: entries that the table may have before it moves.
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
        self._row_shape, self._dtype, self._pool = (num_kv_heads, head_dim), dtype, pool
        self._row_bytes = num_kv_heads * head_dim * dtype.itemsize
        self.num_pages, self.reserved_bytes, self.most_entries, self.generation = 0, 0, 0, 0
        self.free: list[int] = []
        self._rows = self._new_rows(0)
        self.device = self._rows.device
        self.table = PageTable(torch.empty(0, dtype=torch.int32, device=self.device), PAGE_SIZE)

    # ---- what a step reads and writes ----

    def keys(self, layer: int) -> torch.Tensor:
        """Rows of a layer's keys after rotation, [N, KV, hd] in the model dtype.

        Only rows named by slots or by the table belong to the layer.
        """
        return self._rows_of(layer)[: max(self.num_pages * PAGE_ROWS - PAGE_SIZE, 0)]

    def values(self, layer: int) -> torch.Tensor:
        """Rows of a layer's values, [N, KV, hd]; else as `keys`."""
        return self._rows_of(layer)[PAGE_SIZE:]

    def begin_step(self, slots: Array, *, reads: bool) -> None:
        """Begin a forward that writes keys and values, and visits the layers in order.

        Args:
            slots: [W] int64, rows that it writes; negative for none.
            reads: whether it reads rows that it does not write.
        """
        if self._host is not None:
            self._host.begin(slots, reads=reads)

    def turn_to(self, layer: int) -> None:
        """Make `keys` and `values` of a layer usable, and no longer those of others."""
        if self._host is not None:
            self._host.turn_to(layer)

    def end_step(self) -> None:
        """End the forward, which uses no layer any more."""
        if self._host is not None:
            self._host.leave()

    def _rows_of(self, layer: int) -> torch.Tensor:
        """Rows of a layer, or of the place where it visits the device."""
        beyond = layer - (self._num_layers - self.host_layers)
        if beyond >= 0:
            layer -= beyond - beyond % NUM_STREAM_BUFFERS
        count = self.num_pages * PAGE_ROWS
        return self._rows[layer * count : (layer + 1) * count]

    # ---- sizes ----

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on the device, in all layers that lie there."""
        return self._device_layers * PAGE_ROWS * self._row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that somebody has; in a fixed store, of all pages."""
        return (self.num_pages - len(self.free)) * self.page_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return 0 if self._host is None else self._host.num_bytes

    @property
    def _device_layers(self) -> int:
        return device_layers(self._num_layers, self.host_layers)

    # ---- another buffer ----

    def resize(self, count: int, used: Sequence[int] = (), *, through_host: bool = False) -> None:
        """Replace the buffer by one of `count` pages, of which the first are copies of `used`.

        Args:
            count: pages.
            used: numbers of the pages that stay.
            through_host: they wait in host memory, so that the pool never holds both buffers.

        Raises:
            PoolExhaustedError: the pool has no room; all pages are as before.
            torch.OutOfMemoryError: the device has none; likewise.
        """
        pages = self._by_page(self._rows, self.num_pages)
        kept = [pages[:, number] for number in used]
        if through_host:
            kept = [page.cpu() for page in kept]
            del pages  # or the buffer would not be freed
            self._rows = self._new_rows(0)
        try:
            rows = self._new_rows(count)
        except (PoolExhaustedError, torch.OutOfMemoryError):
            if through_host:  # back to where they were
                self._rows = self._new_rows(self.num_pages)
                self._fill(self._rows, self.num_pages, used, kept)
                self.generation += 1
            raise
        self._fill(rows, count, range(len(used)), kept)
        self.free = list(range(len(used), count))[::-1]
        self.num_pages, self.most_entries, self._rows = count, ENTRIES_PER_PAGE * count, rows
        self.reserved_bytes = count * self.page_bytes
        self.generation += 1

    def take_entries(self, count: int) -> None:
        """Let the table have at least `count` entries; more than before make its address stale."""
        if count > self.most_entries:
            self.most_entries = 2 * count
            self.generation += 1

    def copy(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Copy pages to as many other ones, in all layers."""
        pages = self._by_page(self._rows, self.num_pages)
        for source, target in zip(sources, targets, strict=True):
            pages[:, target].copy_(pages[:, source])

    def begin_anew(self, host_layers: int) -> None:
        """Begin again without pages; so many layers of later ones are to lie in host memory."""
        if self._host is not None:
            self._host.close()
        self.resize(0)
        self._host, self.host_layers = None, host_layers

    def take_host_memory(self) -> None:
        """Take host memory for the layers that are to lie there, if that is not done.

        Raises:
            torch.OutOfMemoryError: the host has none.
        """
        if self.host_layers and self._host is None:
            first = self._num_layers - self.host_layers
            places = [self._rows_of(first + index) for index in range(NUM_STREAM_BUFFERS)]
            self._host = HostLayers(range(first, self._num_layers), places)

    def _fill(
        self, rows: torch.Tensor, count: int, numbers: Iterable[int], contents: list[torch.Tensor]
    ) -> None:
        """Write contents to pages of these numbers in a buffer of `count` pages."""
        pages = self._by_page(rows, count)
        for number, content in zip(numbers, contents, strict=True):
            pages[:, number].copy_(content)

    def _by_page(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """View of a buffer of `count` pages: [layers, pages, rows of a page, KV, hd]."""
        return rows.view(self._device_layers, count, PAGE_ROWS, *self._row_shape)

    def _new_rows(self, count: int) -> torch.Tensor:
        """Allocate the rows of `count` pages."""
        shape = (self._device_layers * count * PAGE_ROWS, *self._row_shape)
        with torch.inference_mode(mode=False):  # written to within steps and between them
            return self._pool.keep("kept keys and values", shape, self._dtype)

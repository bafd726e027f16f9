# SPDX-License-Identifier: Apache-2.0
"""Keys and values that requests keep from one denoise step to the next, in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.core.pages import PAGE_ROWS, PAGE_SIZE, part_layers
from vllm.diffusion.core.spans import PageTable
from vllm.diffusion.core.stages import NUM_STREAM_BUFFERS, device_layers
from vllm.diffusion.memory.host import HostLayers

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.diffusion.memory.activation_pool import ActivationPool
    from vllm.diffusion.ops import Array


ENTRIES_PER_PAGE = 16  # of the table: a request's drafts read most of its pages, too


class PageStore:
    """Keys and values of all requests that keep them, in equal pages.

    A page holds PAGE_SIZE consecutive positions of one sequence, in all layers. The pages of one
    layer lie side by side, in each of them the keys, then the values: a row is one position's keys
    or values of one layer. Every few layers, a part, have a buffer. A sequence's pages lie
    anywhere; a table on the device names them, so that one launch can attend to the keys of many
    requests.

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
        device: where the buffers lie.
        num_pages: pages of every buffer.
        reserved_bytes: bytes of the buffers.
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
        self._begin()
        self.device = self._parts[0].device
        self.table = PageTable(torch.empty(0, dtype=torch.int32, device=self.device), PAGE_SIZE)

    # ---- what a step reads and writes ----

    def keys(self, layer: int) -> torch.Tensor:
        """Rows of a layer's keys after rotation, [N, KV, hd] in the model dtype.

        Only rows named by slots or by the table belong to the layer.
        """
        rows = self._rows_of(layer)
        return rows[: max(len(rows) - PAGE_SIZE, 0)]

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
        return self._rows[layer]

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

    # ---- other buffers ----

    def resize(self, count: int) -> None:
        """Replace the buffers by those of `count` pages; the first pages keep number and contents.

        One buffer is replaced after the other, so that the pool never holds all pages twice.

        Raises:
            PoolExhaustedError: the pool has no room; pages stay, in some larger buffers perhaps.
            torch.OutOfMemoryError: the device has none; likewise.
        """
        more = count * self.page_bytes - self.reserved_bytes
        self._pool.check_room("kept keys and values", more)
        for number, part in enumerate(self._parts):
            if part.shape[1] != count:
                self._parts[number] = self._resized(number, part, count)
                self.generation += 1
        added = range(self.num_pages, count)
        self.free = [*reversed(added), *(page for page in self.free if page < count)]
        self.num_pages, self.most_entries = count, ENTRIES_PER_PAGE * count

    def take_entries(self, count: int) -> None:
        """Let the table have at least `count` entries; more than before make its address stale."""
        if count > self.most_entries:
            self.most_entries = 2 * count
            self.generation += 1

    def copy(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Copy pages to as many other ones, in all layers."""
        for source, target in zip(sources, targets, strict=True):
            for part in self._parts:
                part[:, target].copy_(part[:, source])

    def reset(self, host_layers: int) -> None:
        """Begin again without pages; so many layers of later ones are to lie in host memory."""
        if self._host is not None:
            self._host.close()
        self.resize(0)
        self._host, self.host_layers = None, host_layers
        self._begin()

    def take_host_memory(self) -> None:
        """Take host memory for the layers that are to lie there, if that is not done.

        Raises:
            torch.OutOfMemoryError: the host has none.
        """
        if self.host_layers and self._host is None:
            first = self._num_layers - self.host_layers
            places = [self._rows_of(first + index) for index in range(NUM_STREAM_BUFFERS)]
            self._host = HostLayers(range(first, self._num_layers), places)

    def _begin(self) -> None:
        """Make the buffers of the layers on the device, without pages."""
        layers, max_layers = self._device_layers, part_layers(self._num_layers)
        self._rows: list[torch.Tensor] = []  # by layer
        sizes = [min(max_layers, layers - first) for first in range(0, layers, max_layers)]
        self._parts = [self._part(number, size, 0) for number, size in enumerate(sizes)]

    def _resized(self, number: int, part: torch.Tensor, count: int) -> torch.Tensor:
        """Return a part of `count` pages, with the first ones of another."""
        resized = self._part(number, len(part), count)
        stay = min(count, part.shape[1])
        resized[:, :stay].copy_(part[:, :stay])
        self.reserved_bytes += resized.nbytes - part.nbytes
        return resized

    def _part(self, number: int, num_layers: int, count: int) -> torch.Tensor:
        """Allocate a part, [layers, pages, rows of a page, KV, hd], in place of another."""
        shape = (num_layers, count, PAGE_ROWS, *self._row_shape)
        with torch.inference_mode(mode=False):  # written to within steps and between them
            part = self._pool.keep(f"part {number} of kept keys and values", shape, self._dtype)
            first = number * part_layers(self._num_layers)
            self._rows[first : first + num_layers] = part.flatten(1, 2).unbind()
        return part

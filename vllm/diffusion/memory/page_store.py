# SPDX-License-Identifier: Apache-2.0
"""Keys and values that requests cache from one denoising step to the next, in pages."""

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


# Table entries per page; a request's drafts read most of its pages, too.
ENTRIES_PER_PAGE = 16


class PageStore:
    """Cached keys and values of all requests, in equal pages.

    A page holds PAGE_SIZE consecutive positions of one sequence, in all layers. The pages of one
    layer are adjacent, and each contains the keys, then the values. A row is one position's keys or
    values in one layer. Every few layers, called a part, share a buffer. The pages of a sequence
    may be anywhere in the store. A table on the device lists them, so that one launch can attend to
    the keys of many requests.

    ```
    layer      0                          | 1                          | ...
    page       0            | 1           | 0            | 1           |
    rows       64 k | 64 v  | 64 k | 64 v | 64 k | 64 v  | 64 k | 64 v |
    ```

    A `PageAllocator` assigns the pages to requests.

    Args:
        num_layers, num_kv_heads, head_dim: L, KV and hd of the model on this rank.
        dtype: the model dtype.
        pool: source of the memory.
        label: name of the contents, for the pool.

    Attributes:
        device: device of the buffers.
        num_pages: number of pages of every buffer.
        free: pages that no request has; the last one is assigned next.
        host_layers: number of layers whose keys and values are in host memory.
        layout_version: number of times that the pages or their table have moved; addresses and
            slots of an earlier version are stale.
        table: the row of the first key of every page in use, sequence after sequence; it is never
            written again, but replaced when requests get pages.
        most_entries: maximum entries of the table before it moves.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        pool: ActivationPool,
        label: str = "kept keys and values",
    ) -> None:
        self._label, self._own_bytes = label, 0
        self._num_layers, self.host_layers = num_layers, 0
        self._host: HostLayers | None = None
        self._row_shape, self._dtype, self._pool = (num_kv_heads, head_dim), dtype, pool
        self._row_bytes = num_kv_heads * head_dim * dtype.itemsize
        self.num_pages, self.most_entries, self.layout_version = 0, 0, 0
        self.free: list[int] = []
        self._begin()
        self.device = self._parts[0].device
        self.table = PageTable(torch.empty(0, dtype=torch.int32, device=self.device), PAGE_SIZE)

    # ---- reads and writes of a step ----

    def keys(self, layer: int) -> torch.Tensor:
        """Return the rows of a layer's keys after rotation, [N, KV, hd] in the model dtype.

        Only rows in slots or in the table belong to the layer.
        """
        rows = self._rows_of(layer)
        return rows[: max(len(rows) - PAGE_SIZE, 0)]

    def values(self, layer: int) -> torch.Tensor:
        """Return the rows of a layer's values, [N, KV, hd]; otherwise as `keys`."""
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
        """Make `keys` and `values` of a layer valid, and all other layers invalid."""
        if self._host is not None:
            self._host.turn_to(layer)

    def end_step(self) -> None:
        """End the forward; no layer is used afterwards."""
        if self._host is not None:
            self._host.leave()

    def _rows_of(self, layer: int) -> torch.Tensor:
        """Return the rows of a layer, or of its buffer on the device if it is in host memory."""
        beyond = layer - (self._num_layers - self.host_layers)
        if beyond >= 0:
            layer -= beyond - beyond % NUM_STREAM_BUFFERS
        return self._rows[layer]

    def has_window(self, layer: int) -> bool:
        """Whether a layer has the slots and the page table of layers with a window."""
        return False

    # ---- sizes ----

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the buffers."""
        return self._own_bytes

    @property
    def num_whole_pages(self) -> int:
        """Number of pages that have rows in all layers."""
        return self.num_pages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page on the device, in all layers on the device."""
        return self._device_layers * PAGE_ROWS * self._row_bytes

    def bytes_of(self, num_pages: int, num_kept: int) -> int:
        """Return the bytes of the pages of a request with `num_kept` cached positions."""
        return num_pages * self.page_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages in use; in a fixed store, of all pages."""
        return (self.num_pages - len(self.free)) * self.page_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return 0 if self._host is None else self._host.num_bytes

    @property
    def _device_layers(self) -> int:
        return device_layers(self._num_layers, self.host_layers)

    # ---- changing the buffers ----

    def resize(self, count: int) -> None:
        """Resize the buffers to `count` pages; the first pages keep their numbers and contents.

        The buffers are replaced one after the other, so that the pool never holds all pages twice.

        Raises:
            PoolExhaustedError: the pool has no room; pages stay, but some buffers may be larger.
            torch.OutOfMemoryError: the device has no memory; pages stay as above.
        """
        more = count * self.page_bytes - self._own_bytes
        self._pool.check_room(self._label, more)
        for number, part in enumerate(self._parts):
            if part.shape[1] != count:
                self._parts[number] = self._resized(number, part, count)
                self.layout_version += 1
        added = range(self.num_pages, count)
        self.free = [*reversed(added), *(page for page in self.free if page < count)]
        self.num_pages, self.most_entries = count, ENTRIES_PER_PAGE * count

    def take_entries(self, count: int) -> None:
        """Grow the page table to `count` entries. Growing moves it, so `layout_version` grows."""
        if count > self.most_entries:
            self.most_entries = 2 * count
            self.layout_version += 1

    def copy(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Copy pages to an equal number of other pages, in all layers."""
        for source, target in zip(sources, targets, strict=True):
            for part in self._parts:
                part[:, target].copy_(part[:, source])

    def reset(self, host_layers: int) -> None:
        """Start again without pages; later pages of `host_layers` layers are in host memory."""
        if self._host is not None:
            self._host.close()
        self.resize(0)
        self._host, self.host_layers = None, host_layers
        self._begin()

    def take_host_memory(self) -> None:
        """Allocate host memory for the layers in host memory, if that is not done yet.

        Raises:
            torch.OutOfMemoryError: the host has no memory for them.
        """
        if self.host_layers and self._host is None:
            first = self._num_layers - self.host_layers
            places = [self._rows_of(first + index) for index in range(NUM_STREAM_BUFFERS)]
            self._host = HostLayers(range(first, self._num_layers), places)

    def _begin(self) -> None:
        """Create the buffers of the layers on the device, without pages."""
        layers, max_layers = self._device_layers, part_layers(self._num_layers)
        self._rows: list[torch.Tensor] = []  # by layer
        sizes = [min(max_layers, layers - first) for first in range(0, layers, max_layers)]
        self._parts = [self._part(number, size, 0) for number, size in enumerate(sizes)]

    def _resized(self, number: int, part: torch.Tensor, count: int) -> torch.Tensor:
        """Return a part of `count` pages, with the first pages of another part."""
        resized = self._part(number, len(part), count)
        stay = min(count, part.shape[1])
        resized[:, :stay].copy_(part[:, :stay])
        self._own_bytes += resized.nbytes - part.nbytes
        return resized

    def _part(self, number: int, num_layers: int, count: int) -> torch.Tensor:
        """Allocate a part, [layers, pages, rows of a page, KV, hd], replacing another."""
        shape = (num_layers, count, PAGE_ROWS, *self._row_shape)
        with torch.inference_mode(mode=False):  # written within steps and between them
            part = self._pool.keep(f"part {number} of {self._label}", shape, self._dtype)
            first = number * part_layers(self._num_layers)
            self._rows[first : first + num_layers] = part.flatten(1, 2).unbind()
        return part

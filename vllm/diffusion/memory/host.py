# SPDX-License-Identifier: Apache-2.0
"""Host memory: buffers that steps reuse, and layers' kept keys and values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.core.pages import PAGE_ROWS
from vllm.diffusion.core.stages import NUM_STREAM_BUFFERS
from vllm.diffusion.memory.residual_rows import CopyStreams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.ops import Array


class HostBuffers:
    """Named buffers in host memory; each grows to the largest size asked for.

    The contents are undefined when a buffer is taken: whoever takes it writes it first.

    Args:
        is_pinned: pin the memory, so that copies from and to a GPU are asynchronous.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._storage: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [shape]; a second take of `name` reuses its memory."""
        count = math.prod(shape)
        storage = self._storage.get((name, dtype))
        if storage is None or storage.numel() < count:
            self._storage.pop((name, dtype), None)  # first, so that never both are held
            storage = torch.empty(count, dtype=dtype, pin_memory=self._is_pinned)
            self._storage[name, dtype] = storage
        return storage[:count].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held by the pool."""
        return sum(s.numel() * s.element_size() for s in self._storage.values())


class HostLayers:
    """Rows of some layers in host memory, one range each, with places on the device.

    Layers take turns. Layer i gets place i % NUM_STREAM_BUFFERS when the layer that had it before
    is left, so its rows come while the layer before it is computed. Rows written in a layer's turn
    go back when it is left. On the CPU copies are plain ones.

    Args:
        layers: numbers of the layers in host memory.
        places: rows [N, ...] on the device, NUM_STREAM_BUFFERS of them.

    Raises:
        torch.OutOfMemoryError: the host has no room, or may not pin so much.
    """

    def __init__(self, layers: range, places: Sequence[torch.Tensor]) -> None:
        self._first, self._places = layers.start, places
        device = places[0].device
        self._is_pinned = device.type == "cuda"
        self._copies = CopyStreams(device)
        self._layers: list[torch.Tensor] = []
        self._reads, self._written = False, list[slice]()
        self._turn: int | None = None  # of the layer whose rows are in use
        try:
            for _ in layers:
                self._layers.append(self._host_rows(places[0]))
        except RuntimeError as error:
            self.close()
            raise torch.OutOfMemoryError(
                f"kept keys and values: {len(layers)} layers in host memory, "
                f"{len(layers) * places[0].nbytes} bytes: {error}"
            ) from error

    def _host_rows(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate rows in host memory; pinned here, as PyTorch would round their number up."""
        rows = torch.empty(like.shape, dtype=like.dtype)
        if self._is_pinned and rows.nbytes:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(rows.data_ptr(), rows.nbytes, 0)
            )
        return rows

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(rows.nbytes for rows in self._layers)

    def begin(self, slots: Array, *, reads: bool) -> None:
        """Begin a forward, whose first layer may lie on the device or here.

        Args:
            slots: [W] int64, rows that it writes, of every layer; negative for none.
            reads: whether it reads rows that it does not write.
        """
        pages = np.unique(slots[slots >= 0] // PAGE_ROWS)
        runs = np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1)
        self._written = [slice(int(p[0]) * PAGE_ROWS, (int(p[-1]) + 1) * PAGE_ROWS) for p in runs]
        self._turn, self._reads = None, reads
        self._copies.begin()
        if reads:
            for index in range(min(NUM_STREAM_BUFFERS, len(self._layers))):
                self._fetch(index)

    def turn_to(self, layer: int) -> None:
        """Leave the layer before, and wait until this layer's rows are in their place, if here."""
        index = layer - self._first
        if index < 0:
            return
        self.leave()
        self._turn, place = index, index % NUM_STREAM_BUFFERS
        if self._reads:
            self._copies.wait_until_fetched(place)
        else:
            self._copies.claim(place)

    def leave(self) -> None:
        """Store what the current layer's turn has written; fetch a later layer into its place."""
        index, self._turn = self._turn, None
        if index is None:
            return
        place = index % NUM_STREAM_BUFFERS
        self._copies.release(place)
        for rows in self._written:
            self._copies.store(self._places[place][rows], self._layers[index][rows], place)
        following = index + NUM_STREAM_BUFFERS
        if self._reads and following < len(self._layers):
            self._copies.wait_until_free(place)
            self._fetch(following)

    def _fetch(self, index: int) -> None:
        place = index % NUM_STREAM_BUFFERS
        self._copies.fetch(self._layers[index], self._places[place], place)

    def close(self) -> None:
        """Give the memory back, after copies under way."""
        self._copies.finish()
        for rows in self._layers:
            if self._is_pinned and rows.nbytes:
                torch.cuda.cudart().cudaHostUnregister(rows.data_ptr())
        self._layers = []

# SPDX-License-Identifier: Apache-2.0
"""Host memory: buffers that steps reuse, and the cached keys and values of some layers."""

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
    """Named buffers in host memory; each grows to the largest requested size.

    The contents of a buffer are undefined when it is taken, so its user must write it first.

    Args:
        is_pinned: whether to pin the memory, so that copies from and to a GPU are asynchronous.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._storage: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor [shape]; a second take of `name` reuses its memory."""
        count = math.prod(shape)
        storage = self._storage.get((name, dtype))
        if storage is None or storage.numel() < count:
            # First release the old buffer, so that both never exist at once.
            self._storage.pop((name, dtype), None)
            storage = torch.empty(count, dtype=dtype, pin_memory=self._is_pinned)
            self._storage[name, dtype] = storage
        return storage[:count].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(s.numel() * s.element_size() for s in self._storage.values())


class HostLayers:
    """Rows of some layers in host memory, one range per layer, with buffers on the device.

    Layers take turns. Layer i uses buffer i % NUM_STREAM_BUFFERS as soon as the previous layer in
    that buffer is left, so its rows are fetched while the layer before it is computed. Rows written
    in a layer's turn are stored when the layer is left. On the CPU copies are plain ones.

    Args:
        layers: numbers of the layers in host memory.
        places: rows [N, ...] on the device, one tensor per buffer, NUM_STREAM_BUFFERS of them.

    Raises:
        torch.OutOfMemoryError: the host has no memory, or may not pin that much.
    """

    def __init__(self, layers: range, places: Sequence[torch.Tensor]) -> None:
        self._first, self._places = layers.start, places
        device = places[0].device
        self._is_pinned = device.type == "cuda"
        self._copies = CopyStreams(device)
        self._layers: list[torch.Tensor] = []
        self._reads, self._written = False, list[slice]()
        self._turn: int | None = None  # index of the layer whose rows are in use
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
        """Allocate rows in host memory; pinned here, because PyTorch would round their size up."""
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
        """Begin a forward, whose first layer may be on the device or here.

        Args:
            slots: [W] int64, rows that it writes, in every layer; negative for none.
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
        """Leave the previous layer, and wait for this layer's rows, if they are in host memory."""
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
        """Store the rows that the current layer has written; fetch a later layer in its place."""
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
        """Release the memory, after copies in flight."""
        self._copies.finish()
        for rows in self._layers:
            if self._is_pinned and rows.nbytes:
                torch.cuda.cudart().cudaHostUnregister(rows.data_ptr())
        self._layers = []

# SPDX-License-Identifier: Apache-2.0
"""Host memory that steps reuse."""

from __future__ import annotations

import math

import torch


class HostBuffers:
    """Named buffers in host memory; each grows to the largest size asked for.

    The contents are undefined when a buffer is taken: whoever takes it writes it first.

    Args:
        is_pinned: copies from and to a GPU need not wait for the host.
    """

    def __init__(self, *, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._storage: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor of `shape`; a second take of `name` reuses its memory."""
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

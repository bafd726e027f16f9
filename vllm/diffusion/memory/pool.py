# SPDX-License-Identifier: Apache-2.0
"""Buffers that live for one denoise step, reused from step to step."""

from __future__ import annotations

import math

import torch


class BufferPool:
    """Named scratch buffers on one device; each grows to the largest size asked for.

    The contents are undefined when a buffer is taken: whoever takes it writes it first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storage: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor of `shape`; a second take of `name` reuses its memory."""
        count = math.prod(shape)
        storage = self._storage.get((name, dtype))
        if storage is None or storage.numel() < count:
            storage = torch.empty(count, dtype=dtype, device=self._device)
            self._storage[name, dtype] = storage
        return storage[:count].view(shape)

    @property
    def num_bytes(self) -> int:
        """Bytes held by the pool."""
        return sum(s.numel() * s.element_size() for s in self._storage.values())

# SPDX-License-Identifier: Apache-2.0
"""Keys and values that a request keeps from one denoise step to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeyValueCache:
    """Keys and values of every layer and position of one sequence.

    A forward over a window of positions overwrites the window's rows and attends over all rows.

    Attributes:
        k, v: [L, T, KV, hd], keys after rotation, model dtype.
    """

    k: torch.Tensor
    v: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()


class CachePool:
    """The caches of the running requests, by request.

    Args:
        num_layers, num_kv_heads, head_dim: L, KV and hd of the model on this rank.
        dtype: the model dtype.
        device: where the model lives.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = (num_layers, num_kv_heads, head_dim)
        self._dtype = dtype
        self._device = device
        self._caches: dict[str, KeyValueCache] = {}

    def allocate(self, req_id: str, length: int) -> KeyValueCache:
        """The cache of a request of `length` positions, not initialised."""
        num_layers, num_kv_heads, head_dim = self._shape
        shape = (num_layers, length, num_kv_heads, head_dim)
        k, v = (torch.empty(shape, dtype=self._dtype, device=self._device) for _ in range(2))
        self._caches[req_id] = KeyValueCache(k, v)
        return self._caches[req_id]

    def release(self, req_id: str) -> None:
        """Forget the cache of a request, if it has one."""
        self._caches.pop(req_id, None)

    @property
    def num_bytes(self) -> int:
        return sum(cache.num_bytes for cache in self._caches.values())

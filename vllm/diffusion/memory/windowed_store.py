# SPDX-License-Identifier: Apache-2.0
"""Page store of a model in which some layers have a sliding window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.core.spans import PageTable
from vllm.diffusion.memory.page_store import PageStore

if TYPE_CHECKING:
    import torch

    from vllm.diffusion.core.pages import WindowLayers
    from vllm.diffusion.memory.activation_pool import ActivationPool
    from vllm.diffusion.memory.shapes import ModelShape


def page_store_of(shape: ModelShape, pool: ActivationPool) -> PageStore:
    """Return an empty store for a model of these sizes."""
    if shape.window_layers is not None:
        return WindowedPageStore(shape.window_layers, shape.num_layers, shape.dtype, pool)
    return PageStore(shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype, pool)


class WindowedPageStore(PageStore):
    """Cached keys and values in pages of two kinds.

    Layers with a window have pages of their own, called window pages. The scheduler gives them only
    to the end of a sequence, which these layers read (`window_paging.py`). The pages of this store
    belong to all other layers. Their number is fixed.

    Args:
        layers: the layers with a window.
        num_layers: number of all layers.
        dtype: the model dtype.
        pool: source of the memory.

    Attributes:
        windows: the window pages.
    """

    def __init__(
        self, layers: WindowLayers, num_layers: int, dtype: torch.dtype, pool: ActivationPool
    ) -> None:
        self.windows = PageStore(
            len(layers.indices), *layers.heads, dtype, pool, "kept keys and values of windows"
        )
        self._own_index: dict[int, int] = {}
        for index in range(num_layers):
            is_window = index in layers.indices
            before = sum((other in layers.indices) == is_window for other in range(index))
            self._own_index[index] = before
        self._window_layers, self._first_page = frozenset(layers.indices), layers.first_page
        super().__init__(num_layers - len(layers.indices), *layers.other_heads, dtype, pool)
        nothing = self.table.rows
        self.table = PageTable(nothing, PAGE_SIZE, nothing.clone())

    def keys(self, layer: int) -> torch.Tensor:
        if layer in self._window_layers:
            return self.windows.keys(self._own_index[layer])
        return super().keys(self._own_index[layer])

    def values(self, layer: int) -> torch.Tensor:
        if layer in self._window_layers:
            return self.windows.values(self._own_index[layer])
        return super().values(self._own_index[layer])

    def has_window(self, layer: int) -> bool:
        return layer in self._window_layers

    @property
    def num_whole_pages(self) -> int:
        return min(self.num_pages, self.windows.num_pages)

    @property
    def reserved_bytes(self) -> int:
        return self._own_bytes + self.windows.reserved_bytes

    def bytes_of(self, num_pages: int, num_kept: int) -> int:
        num_window_pages = num_pages - self._first_page(num_kept)
        own_bytes = super().bytes_of(num_pages, num_kept)
        return own_bytes + num_window_pages * self.windows.page_bytes

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.windows.reserved_bytes

    def reset(self, host_layers: int) -> None:
        super().reset(host_layers)
        self.windows.reset(0)

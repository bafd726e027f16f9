# SPDX-License-Identifier: Apache-2.0
"""Device memory of captured graphs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.diffusion.memory.activation_pool import ActivationPool

GRAPH_MEMORY_SHARE = 0.02  # of the device's memory


class GraphMemory:
    """One allocator pool for all captured graphs, and the bytes that they take.

    Graphs are replayed one at a time, so their temporaries may share addresses.

    Args:
        device: a CUDA device.
        pool: whose memory the graphs take, where it has some of its own for them.
        budget_bytes: what the graphs may take; by default a share of the device's memory.
    """

    def __init__(
        self, device: torch.device, pool: ActivationPool, budget_bytes: int | None = None
    ) -> None:
        self._device = device
        own = pool.graph_pool()
        self._pool: Any = torch.cuda.graph_pool_handle() if own is None else own
        total = torch.cuda.mem_get_info(device)[1]
        self.budget_bytes = (
            int(total * GRAPH_MEMORY_SHARE) if budget_bytes is None else budget_bytes
        )
        self.used_bytes = 0

    @property
    def has_room(self) -> bool:
        """Whether another graph may be captured."""
        return self.used_bytes < self.budget_bytes

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture what the block launches into `graph`, and count the memory it took."""
        torch.cuda.synchronize(self._device)
        free_before = torch.cuda.mem_get_info(self._device)[0]
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            yield
        torch.cuda.synchronize(self._device)
        self.used_bytes += max(free_before - torch.cuda.mem_get_info(self._device)[0], 0)

# SPDX-License-Identifier: Apache-2.0
"""Device memory of captured graphs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.diffusion.memory.activation_pool import ActivationPool

DEVICE_SHARE = 0.02  # maximum share of the device's memory for graphs
POOL_SHARE = 1 / 16  # maximum share of the activation pool for graphs


class GraphMemory:
    """Allocator pool shared by all captured graphs, with a count of its bytes.

    Graphs are replayed one at a time, so their temporaries may share addresses.

    Args:
        device: a CUDA device.
        pool: activation pool; graphs take their memory from it if it supports that.

    Attributes:
        budget_bytes: maximum bytes of graphs: a share of the device's memory or of the pool,
            whichever is smaller.
    """

    def __init__(self, device: torch.device, pool: ActivationPool) -> None:
        self._device, self._activation_pool = device, pool
        self._own_pool = torch.cuda.graph_pool_handle()
        total = torch.cuda.mem_get_info(device)[1]
        self.budget_bytes = int(min(total * DEVICE_SHARE, pool.budget_bytes * POOL_SHARE))
        self._measured_bytes = 0
        self._settled_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes that the graphs have taken."""
        counted = self._activation_pool.graph_bytes
        return max(self._measured_bytes if counted is None else counted, self._settled_bytes)

    def settle(self, num_bytes: int) -> None:
        """Set the bytes that all ranks count, because their plans must be equal."""
        self._settled_bytes = num_bytes

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether another graph may be captured, of a step that needs `num_bytes` at once.

        Graphs share their memory, so it is enough that some budget is left. But a graph that needs
        more than the whole budget would leave nothing for graphs of fewer rows.
        """
        return self.used_bytes < self.budget_bytes and num_bytes <= self.budget_bytes

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the launches of the block into `graph`, and count the memory taken."""
        # Requested each time, because trimming replaces the pool's memory for graphs.
        pool: Any = self._activation_pool.graph_pool() or self._own_pool
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            # Memory of this process only: other processes may meanwhile use the device's free
            # memory.
            held_before = torch.cuda.memory_reserved(self._device)
            yield
            self._measured_bytes += torch.cuda.memory_reserved(self._device) - held_before

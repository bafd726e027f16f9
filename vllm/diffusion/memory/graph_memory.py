# SPDX-License-Identifier: Apache-2.0
"""Device memory of captured graphs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.diffusion.memory.activation_pool import ActivationPool

DEVICE_SHARE = 0.02  # of the device's memory that graphs may take
POOL_SHARE = 1 / 16  # and of the activation pool


class GraphMemory:
    """Allocator pool shared by all captured graphs, with a count of its bytes.

    Graphs are replayed one at a time, so their temporaries may share addresses.

    Args:
        device: a CUDA device.
        pool: activation pool; graphs take their memory from it, where it has some for them.

    Attributes:
        budget_bytes: most bytes of graphs: a share of the device's memory or of the pool, whichever
            is less.
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
        """Set the bytes that all ranks count, as their plans must be equal."""
        self._settled_bytes = num_bytes

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether another graph may be captured, of a step that takes `num_bytes` at once.

        Graphs share their memory, so what counts is whether any is left; but one that needs more
        than all may take would leave nothing to graphs of fewer rows.
        """
        return self.used_bytes < self.budget_bytes and num_bytes <= self.budget_bytes

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the launches of the block into `graph`, and count the memory taken."""
        # Asked anew each time: after trimming, the pool's memory for graphs is another one.
        pool: Any = self._activation_pool.graph_pool() or self._own_pool
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            # Of this process: what the device has left, others may take of meanwhile.
            held_before = torch.cuda.memory_reserved(self._device)
            yield
            self._measured_bytes += torch.cuda.memory_reserved(self._device) - held_before

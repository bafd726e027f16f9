# SPDX-License-Identifier: Apache-2.0
"""PyTorch memory pool whose segments come from an arena."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from ._native import native
from .arena import check_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch.cuda.memory import CUDAPluggableAllocator

    from .arena import Arena


class TorchPool:
    """A `torch.cuda.MemPool` over an arena, within the arena's limit.

    ::

        pool = TorchPool(arena, 64 << 30)
        with pool.use():                       # tensors that this thread allocates
            y = torch.softmax(x, dim=-1)
        with torch.cuda.graph(graph, pool=pool.id):    # memory that the graph keeps
            ...

    If the arena's limit or the card does not allow an allocation, PyTorch raises
    `torch.OutOfMemoryError` as it would without the pool (its message describes the whole card) and
    stays usable.

    Freed tensors stay with PyTorch's caching allocator, inside the pool, until `trim`. Tensors and
    graphs outlive `close`, and so does their memory. So does the cuBLAS workspace (32 MiB on
    Hopper): PyTorch allocates it once per stream, from the pool that is in use at the stream's
    first matrix product. A process can have 16 pools at a time.
    """

    def __init__(self, arena: Arena, reserve_bytes: int) -> None:
        """Take addresses from the end of the arena's range; nothing is mapped yet.

        Args:
            arena: Source of addresses and memory.
            reserve_bytes: Size of the address range, which the pool keeps as long as the arena
                lives. Segments are placed in it first fit, so reserve several times the memory in
                use.

        Raises:
            ValueError: An argument is out of range.
            ReservationError: The addresses are not free behind the arena's front.
            VmmError: 16 pools are open, or hold memory.
            ClosedArenaError: The arena is closed.
        """
        check_count("TorchPool", "reserve_bytes", reserve_bytes, 1)
        self._device = arena.device
        self._segments = native().SegmentPool(arena._arena, reserve_bytes)
        weakref.finalize(self, self._segments.close)
        self._allocator = _pluggable_allocator(native().attach_hooks(self._segments))
        self._mem_pool: torch.cuda.MemPool | None = None

    @property
    def mem_pool(self) -> torch.cuda.MemPool:
        """The pool as a PyTorch object."""
        import torch

        if self._mem_pool is None:
            with torch.cuda.device(self._device):
                self._mem_pool = torch.cuda.MemPool(self._allocator.allocator())
        return self._mem_pool

    @property
    def id(self) -> tuple[int, int]:
        """The argument `pool` of `torch.cuda.graph`."""
        return self.mem_pool.id

    @contextmanager
    def use(self) -> Iterator[None]:
        """Return a context in which this thread's tensors are allocated from the pool.

        Only tensors on the pool's device are affected.
        """
        import torch

        # Keeps the pool alive to the end of the context, even if `trim` is called meanwhile.
        mem_pool = self.mem_pool
        with torch.cuda.use_mem_pool(mem_pool, self._device):
            yield

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the pool that PyTorch holds, in whole chunks."""
        return int(self._segments.in_use_bytes)

    def trim(self) -> None:
        """Return segments without living tensors to the arena, as spares.

        This ends PyTorch's pool; the next use starts another one. Not allowed while a stream is
        being captured. Segments of living tensors and graphs stay, and so do segments of a `use`
        that has not ended.
        """
        import torch

        if self._mem_pool is not None:
            self._mem_pool = None
            # This also frees segments of pools that ended earlier and whose tensors are gone by
            # now.
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Refuse further allocations, and free the memory once tensors and graphs are gone."""
        self.trim()
        self._segments.close()


@cache
def _pluggable_allocator(index: int) -> CUDAPluggableAllocator:
    """Make PyTorch's allocator object for a pair of hooks.

    The cache keeps it forever, because living blocks refer to it.
    """
    from torch.cuda.memory import CUDAPluggableAllocator

    return CUDAPluggableAllocator(
        str(native().__file__), f"vmm_allocate_{index}", f"vmm_free_{index}"
    )

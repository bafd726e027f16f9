# SPDX-License-Identifier: Apache-2.0
"""The pool on CUDA virtual memory: buffers and PyTorch's own memory in one arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.memory.activation_pool import ActivationPool, PoolExhaustedError, PoolSlice
from vllm.diffusion.ops import arena as vmm
from vllm.logger import init_logger

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

logger = init_logger(__name__)

MAX_KNOWN_PLACES = 4096


def activation_pool(
    budget_bytes: int, device: torch.device, *, use_vmm: bool, chunk_bytes: int | None = None
) -> ActivationPool:
    """Create a pool, on virtual memory if requested, built and supported by the device.

    Args:
        budget_bytes: maximum bytes in use at a time.
        device: device of the buffers.
        use_vmm: False uses PyTorch's allocator everywhere.
        chunk_bytes: unit of physical memory; None for the allocator's default.
    """
    if use_vmm and device.type == "cuda" and vmm.is_built():
        try:
            return ArenaPool(budget_bytes, device, chunk_bytes)
        except vmm.VmmError as error:
            logger.warning(
                "activation pool: uses PyTorch's allocator, because virtual memory failed: %s",
                error,
            )
    return ActivationPool(budget_bytes, device)


class ArenaPool(ActivationPool):
    """Pool on one arena: buffers at its front, PyTorch's allocations in pools behind them.

    The same offset is the same memory for as long as it is held. PyTorch's allocations within
    `temporaries` are measured, so they need not be announced.

    Args:
        budget_bytes: maximum physical memory of buffers, temporaries and graphs together.
        device: a CUDA device.
        chunk_bytes: unit of physical memory; None for the allocator's default.
    """

    backing_name = "vmm"

    def __init__(
        self, budget_bytes: int, device: torch.device, chunk_bytes: int | None = None
    ) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(budget_bytes, torch.device("cuda", index))
        card = torch.cuda.get_device_properties(index).total_memory
        # Addresses cost almost nothing, so each of the three regions could hold the whole card.
        self._arena = vmm.Arena(
            4 * card, chunk_bytes=chunk_bytes, limit_bytes=budget_bytes, device=index
        )
        self._temporaries = vmm.TorchPool(self._arena, card)
        self._graphs = vmm.TorchPool(self._arena, card)
        self._known: dict[tuple[int, int], PoolSlice] = {}

    def expect(self, name: str, num_bytes: int) -> None:
        """Count nothing, because `other_bytes` includes PyTorch's memory once it is allocated."""

    def _slice_at(self, offset: int, num_bytes: int) -> PoolSlice:
        pool_slice = self._known.get((offset, num_bytes))
        if pool_slice is None:
            if len(self._known) >= MAX_KNOWN_PLACES:
                self._known.clear()
            pool_slice = PoolSlice(offset, self._memory(offset, num_bytes))
            self._known[offset, num_bytes] = pool_slice
        return pool_slice

    def _memory(self, offset: int, num_bytes: int) -> torch.Tensor:
        try:
            self._arena.grow(offset + num_bytes)
        except (vmm.LimitError, vmm.OutOfMemoryError):
            self.drop_unused()  # the memory comes back as spares
            self._grow_or_say_why(offset + num_bytes)
        return self._arena.tensor(offset, (num_bytes,), torch.uint8)

    def _grow_or_say_why(self, num_bytes: int) -> None:
        try:
            self._arena.grow(num_bytes)
        except vmm.LimitError as error:
            raise PoolExhaustedError(
                "budget", error.held_bytes + error.requested_bytes, error.limit_bytes
            ) from error
        except vmm.OutOfMemoryError as error:
            raise PoolExhaustedError(
                "device memory",
                error.held_bytes + error.requested_bytes,
                error.held_bytes + error.free_bytes,
            ) from error

    def _keep(self, name: str, num_bytes: int) -> torch.Tensor:
        with self._temporaries.use():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def temporaries(self) -> AbstractContextManager[None]:
        return self._temporaries.use()

    def graph_pool(self) -> tuple[int, int] | None:
        return self._graphs.id

    @property
    def graph_bytes(self) -> int:
        return self._graphs.in_use_bytes

    @property
    def other_bytes(self) -> int:
        return self._temporaries.in_use_bytes + self._graphs.in_use_bytes

    @property
    def num_bytes(self) -> int:
        return max(self._arena.statistics().held_bytes, self.used_bytes)

    def drop_unused(self) -> None:
        self._temporaries.trim()
        torch.cuda.empty_cache()

    def trim(self) -> None:
        self._known.clear()
        for pool in (self._temporaries, self._graphs):
            pool.trim()
        try:
            self._arena.shrink(self._end)
        except vmm.InUseError as error:  # a graph's buffers, for example
            self._arena.shrink(error.end_bytes)
        self._arena.trim()

    def close(self) -> None:
        """Release everything; memory of tensors and graphs is released when they are gone."""
        self._known.clear()
        self._scopes = [(0, {})]
        for pool in (self._temporaries, self._graphs):
            pool.close()
        self._arena.close()

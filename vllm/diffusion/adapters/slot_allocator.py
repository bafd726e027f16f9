# SPDX-License-Identifier: Apache-2.0
"""Memory in which slots of adapters lie, and which sleep may release."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from vllm.diffusion.ops import arena as vmm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_ALIGNMENT = 512  # bytes


class SlotAllocator:
    """Memory of all slots, which sleep cannot release: it only discards the contents."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._tensors: list[Tensor] = []

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Return a tensor of zeros, whose address stays."""
        tensor = torch.zeros(*shape, dtype=self._dtype, device=self._device)
        self._tensors.append(tensor)
        return tensor

    def release(self) -> None:
        """Lose the contents of all tensors."""
        for tensor in self._tensors:
            tensor.fill_(torch.nan)

    def restore(self) -> None:
        """Make all tensors zeros, at the addresses that they had."""
        for tensor in self._tensors:
            tensor.zero_()


class ArenaSlotAllocator(SlotAllocator):
    """Memory of all slots in a range of a GPU's addresses, which sleep releases."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype, device)
        index = torch.cuda.current_device() if device.index is None else device.index
        card = torch.cuda.get_device_properties(index).total_memory
        self._arena = vmm.Arena(card, device=index)
        self._end = 0

    def zeros(self, shape: Sequence[int]) -> Tensor:
        start, num_bytes = self._end, math.prod(shape) * self._dtype.itemsize
        self._arena.grow(start + num_bytes)
        tensor: Tensor = self._arena.tensor(start, tuple(shape), self._dtype, holds=False)
        self._tensors.append(tensor.zero_())
        self._end += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return tensor

    def release(self) -> None:
        self._arena.shrink(0)
        self._arena.trim()

    def restore(self) -> None:
        self._arena.grow(self._end)
        super().restore()

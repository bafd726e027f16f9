# SPDX-License-Identifier: Apache-2.0
"""Where a stage gets the memory that it writes before its results."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


class Buffers(Protocol):
    """Named scratch memory; what is taken within a scope is given back at its end."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised, contiguous tensor."""

    def expect(self, name: str, num_bytes: int) -> None:
        """PyTorch itself will allocate this much before the scope ends."""

    def scope(self, stage: str = "") -> AbstractContextManager[None]:
        """A stage, or a part of one."""


class FreshBuffers:
    """A new tensor for every buffer, which PyTorch frees when nothing refers to it.

    Args:
        device: of the tensors.
        counted: who is told of them; None tells nobody. In a pool on virtual memory they share
            theirs with what attention returns, which lies beside the buffers.
    """

    def __init__(self, device: torch.device, counted: Buffers | None = None) -> None:
        self._device, self._counted = device, counted

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.expect(name, math.prod(shape) * dtype.itemsize)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def expect(self, name: str, num_bytes: int) -> None:
        if self._counted is not None:
            self._counted.expect(name, num_bytes)

    def scope(self, stage: str = "") -> AbstractContextManager[None]:
        return nullcontext()

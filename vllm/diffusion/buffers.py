# SPDX-License-Identifier: Apache-2.0
"""Where a stage gets the memory that it writes before its results."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor


class Buffer(NamedTuple):
    """Scratch memory that a stage takes for each of its rows.

    Attributes:
        name: within a step.
        shape: of the numbers of a row.
        dtype: of the numbers.
        is_temporary: PyTorch allocates it, and the pool hears of it; else it is the pool's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_temporary: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def quantised(self) -> tuple[Buffer, Buffer]:
        """What the same rows take as fp8: the numbers, and a scale for each row."""
        scales = Buffer(f"scales of {self.name}", (), torch.float32, self.is_temporary)
        return self._replace(dtype=torch.float8_e4m3fn), scales

    def take(self, buffers: Buffers, num_rows: int) -> Tensor:
        """An uninitialised tensor [num_rows, *shape]."""
        return buffers.take(self.name, (num_rows, *self.shape), self.dtype)

    def expect(self, buffers: Buffers, num_rows: int) -> None:
        """Say that PyTorch itself will allocate so many rows."""
        buffers.expect(self.name, num_rows * self.row_bytes)


def row_bytes(buffers: Iterable[Buffer], *, is_temporary: bool | None = None) -> int:
    """The sum over the buffers; of PyTorch's, or the pool's, alone where that is said."""
    return sum(b.row_bytes for b in buffers if is_temporary in (None, b.is_temporary))


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

# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of stages: declarations of buffers, and where their memory comes from."""

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
        name: name, unique within a step.
        is_temporary: whether PyTorch allocates the buffer and the pool only counts it; otherwise
            the pool allocates it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_temporary: bool = False

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def quantised(self) -> tuple[Buffer, Buffer]:
        """Buffers of equally shaped fp8 rows: the numbers, and a scale for each row."""
        scales = Buffer(f"scales of {self.name}", (), torch.float32, self.is_temporary)
        return self._replace(dtype=torch.float8_e4m3fn), scales

    def take(self, buffers: Buffers, num_rows: int) -> Tensor:
        """Return an uninitialised tensor [num_rows, *shape]."""
        return buffers.take(self.name, (num_rows, *self.shape), self.dtype)

    def expect(self, buffers: Buffers, num_rows: int) -> None:
        """Announce that PyTorch itself will allocate `num_rows` rows."""
        buffers.expect(self.name, num_rows * self.row_bytes)


def row_bytes(buffers: Iterable[Buffer], *, is_temporary: bool | None = None) -> int:
    """Sum the bytes of a row over the buffers, or over one kind if `is_temporary` is given."""
    return sum(b.row_bytes for b in buffers if is_temporary in (None, b.is_temporary))


class Buffers(Protocol):
    """Named scratch memory; buffers taken within a scope are released at its end."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised, contiguous tensor."""

    def expect(self, name: str, num_bytes: int) -> None:
        """Announce that PyTorch itself will allocate `num_bytes` before the scope ends."""

    def scope(self, stage: str = "") -> AbstractContextManager[None]:
        """Return the context of a stage, or of a part of a stage."""


class FreshBuffers:
    """Allocates a new tensor for every buffer, which PyTorch frees when it is unused.

    Args:
        device: device of the tensors.
        counted: buffers to which their bytes are announced; None announces nothing. A pool on
            virtual memory counts them together with attention's results, which are also outside its
            buffers.
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

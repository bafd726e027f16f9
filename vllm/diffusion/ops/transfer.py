# SPDX-License-Identifier: Apache-2.0
"""Small arrays on their way between host and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Where the host prepares a step: operations on arrays cost a fraction of those on tensors.
Array: TypeAlias = np.ndarray[Any, Any]

_ALIGNMENT = 16  # bytes; every array starts on its own dtype's boundary


class Staging:
    """Host arrays that are copied to a GPU side by side, again and again, to the same addresses.

    Args:
        like: arrays of the wanted shapes and dtypes.
        device: a CUDA device.

    Attributes:
        arrays: of those shapes and dtypes, in pinned memory, uninitialised. They may be written
            once the copy before has ended.
        tensors: where `upload` copies them to.
    """

    def __init__(self, like: Sequence[Array], device: torch.device) -> None:
        size = sum(_padded(array) for array in like)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(size, dtype=torch.uint8, device=device)
        self.arrays: list[Array] = []
        self.tensors: list[torch.Tensor] = []
        start = 0
        for array in like:
            place = slice(start, start + array.nbytes)
            dtype = torch.from_numpy(array).dtype
            host = self._host[place].view(dtype).view(array.shape)
            self.arrays.append(host.numpy())
            self.tensors.append(self._device[place].view(dtype).view(array.shape))
            start += _padded(array)

    def upload(self) -> None:
        """Copy the arrays; the host does not wait."""
        self._device.copy_(self._host, non_blocking=True)


def to_device(arrays: Sequence[Array], device: torch.device) -> list[torch.Tensor]:
    """The arrays on `device`, by one copy that the host does not wait for.

    Args:
        arrays: contiguous.
        device: where they are wanted; on CPU the tensors share the arrays' memory.

    Returns:
        tensors of the same shapes and dtypes; on a GPU views of one allocation.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # Pinned memory comes from torch's own cache, which gives it out again after the copy only.
    staging = Staging(arrays, device)
    for staged, array in zip(staging.arrays, arrays, strict=True):
        staged[...] = array
    staging.upload()
    return staging.tensors


class HostCopy:
    """A tensor's copy on the host, which the device makes when it gets there.

    Args:
        source: any tensor; one on the host is its own copy.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._host = source
        if source.is_cuda:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._host.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> torch.Tensor:
        """The copy, once it is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def _padded(array: Array) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT

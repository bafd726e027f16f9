# SPDX-License-Identifier: Apache-2.0
"""Transfer of small arrays between host and device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where the host prepares a step: operations on arrays cost a fraction of those on tensors.
Array: TypeAlias = np.ndarray[Any, Any]

_PATIENCE_S = 0.002  # a host asks again and again before it sleeps
_ALIGNMENT = 16  # bytes; every array starts on its own dtype's boundary


class Staging:
    """Host arrays that are copied to a GPU side by side, always to fixed addresses.

    Args:
        like: arrays of the wanted shapes and dtypes, in tuples and named tuples; what else these
            hold stays as it is.
        device: a CUDA device.

    Attributes:
        arrays: arrays to write to, nested as `tensors`, in pinned memory, uninitialised at first.
            They must not change until the device has copied them.
        tensors: target of `upload`: equal shapes and dtypes, nested alike.
    """

    def __init__(self, like: Any, device: torch.device) -> None:
        leaves = _leaves(like)
        size = sum(_padded(array) for array in leaves)
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(size, dtype=torch.uint8, device=device)
        arrays: list[Array] = []
        tensors: list[torch.Tensor] = []
        start = 0
        for array in leaves:
            place = slice(start, start + array.nbytes)
            dtype = torch.from_numpy(array).dtype
            host = self._host[place].view(dtype).view(array.shape)
            arrays.append(host.numpy())
            tensors.append(self._device[place].view(dtype).view(array.shape))
            start += _padded(array)
        self._flat = arrays
        self.arrays: Any = _nested(like, iter(arrays))
        self.tensors: Any = _nested(like, iter(tensors))

    def write(self, values: Any) -> None:
        """Write arrays of equal shapes, nested alike."""
        for staged, array in zip(self._flat, _leaves(values), strict=True):
            staged[...] = array

    def upload(self) -> None:
        """Copy the arrays; the host does not wait."""
        self._device.copy_(self._host, non_blocking=True)


class GraphInputs:
    """Host arrays that a CUDA graph copies to the device itself, whenever it is replayed.

    A copy among the graph's nodes costs the host nothing, but leaves no event that says when it is
    over. So a number goes with the arrays, and the graph returns it: until that of the newest
    replay is back, the arrays may still be read.

    Args:
        like: arrays of the wanted shapes and dtypes, in tuples and named tuples; what else these
            hold stays as it is.
        device: a CUDA device.

    Attributes:
        tensors: tensors that the graph may read after `upload`: equal shapes and dtypes, nested
            alike.
    """

    def __init__(self, like: Any, device: torch.device) -> None:
        self._staging = Staging((like, np.zeros(1, dtype=np.int64)), device)
        self._arrays, self._sent = self._staging.arrays
        self.tensors, self._there = self._staging.tensors
        self._back = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._returned: Array = self._back.numpy()
        self._sent[0] = 0

    def wait(self) -> None:
        """Wait until the device has copied the newest arrays.

        Waits for the number alone, not for the end of the graph, unless it takes too long.
        """
        patience = time.perf_counter() + _PATIENCE_S
        while self._returned[0] != self._sent[0]:
            if time.perf_counter() > patience:
                torch.cuda.current_stream().synchronize()
                return

    def to_write(self) -> Any:
        """Return the arrays, nested as `tensors`, for one replay; uninitialised at first.

        Waits until the device has copied their old contents, which it mostly has long since.
        """
        self.wait()
        self._sent[0] += 1
        return self._arrays

    def upload(self) -> None:
        """Copy the arrays; must be captured as the first node of the graph."""
        self._staging.upload()
        self._back.copy_(self._there, non_blocking=True)


def to_device(arrays: Any, device: torch.device) -> Any:
    """Copy arrays to `device`, in one transfer that the host does not wait for.

    Args:
        arrays: contiguous arrays, in tuples and named tuples; what else these hold stays as it is.
        device: target device; on CPU the tensors share the arrays' memory.

    Returns:
        the same tuples, with tensors of the same shapes and dtypes; on a GPU they are views of one
        allocation.

    Raises:
        TypeError: `arrays` is a list or the like, which would stay as it is.
    """
    if not isinstance(arrays, np.ndarray | tuple):
        raise TypeError(f"to_device: wanted an array or a tuple, given {type(arrays).__name__}")
    if device.type == "cpu":
        return _nested(arrays, map(torch.from_numpy, _leaves(arrays)))
    # Pinned memory comes from torch's own cache, which gives it out again after the copy only.
    staging = Staging(arrays, device)
    staging.write(arrays)
    staging.upload()
    return staging.tensors


class HostCopy:
    """Copy of a tensor on the host, made by the device when it gets there.

    Args:
        source: any tensor; one on the host is its own copy.

    Attributes:
        host: the copy, undefined before `wait`.
    """

    def __init__(self, source: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self.host = source
        if source.is_cuda:
            self.host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self.host.copy_(source, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> torch.Tensor:
        """Wait for the copy and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.host


def _padded(array: Array) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


def _leaves(nested: Any) -> list[Array]:
    """Return the arrays in nested tuples, in order."""
    if isinstance(nested, np.ndarray):
        return [nested]
    if not isinstance(nested, tuple):
        return []
    return [array for part in nested for array in _leaves(part)]


def _nested(like: Any, values: Iterator[Any]) -> Any:
    """Return `like` with every array replaced by the next of `values`."""
    if isinstance(like, np.ndarray):
        return next(values)
    if not isinstance(like, tuple):
        return like
    parts = [_nested(part, values) for part in like]
    return like._make(parts) if hasattr(like, "_make") else tuple(parts)

# SPDX-License-Identifier: Apache-2.0
"""Transfer of small arrays between host and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# Arrays on the host, which prepare a step at a fraction of the cost of tensors.
Array: TypeAlias = np.ndarray[Any, Any]

_ALIGNMENT = 16  # bytes; enough for the alignment of every dtype


class Staging:
    """Host arrays that are copied to a GPU in one block, always to fixed addresses.

    Args:
        like: arrays of the required shapes and dtypes, in tuples and named tuples; other values in
            these are kept.
        device: a CUDA device.

    Attributes:
        arrays: arrays to write to, nested like `tensors`, in pinned memory, uninitialised at first.
            They must not change until the device has copied them.
        tensors: target of `upload`: equal shapes and dtypes, nested in the same way.
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
        """Write arrays of equal shapes, nested in the same way."""
        for staged, array in zip(self._flat, _leaves(values), strict=True):
            staged[...] = array

    def upload(self) -> None:
        """Start to copy the arrays, without waiting on the host."""
        self._device.copy_(self._host, non_blocking=True)


def to_device(arrays: Any, device: torch.device) -> Any:
    """Copy arrays to `device` in one transfer, without waiting on the host.

    Args:
        arrays: contiguous arrays, in tuples and named tuples; other values in these are kept.
        device: target device; on CPU the tensors share the arrays' memory.

    Returns:
        the same tuples, with tensors of the same shapes and dtypes; on a GPU they are views of one
        allocation.

    Raises:
        TypeError: `arrays` is a list or similar, which would be returned unchanged.
    """
    if not isinstance(arrays, np.ndarray | tuple):
        raise TypeError(f"to_device: wanted an array or a tuple, given {type(arrays).__name__}")
    if device.type == "cpu":
        return _nested(arrays, map(torch.from_numpy, _leaves(arrays)))
    # PyTorch's cache of pinned memory reuses a block only after its copy has ended.
    staging = Staging(arrays, device)
    staging.write(arrays)
    staging.upload()
    return staging.tensors


class HostCopy:
    """Asynchronous copy of a tensor to the host.

    Args:
        source: any tensor; a tensor on the host is its own copy.

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

# SPDX-License-Identifier: Apache-2.0
"""Small host arrays on their way to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGNMENT = 16  # bytes; every array starts on its own dtype's boundary


def to_device(arrays: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The arrays on `device`, by one copy that the host does not wait for.

    Args:
        arrays: contiguous, on the host.
        device: where they are wanted; on CPU the arrays themselves are returned.

    Returns:
        tensors of the same shapes and dtypes; on a GPU views of one allocation.
    """
    if device.type == "cpu":
        return list(arrays)
    packed = torch.empty(packed_bytes(arrays), dtype=torch.uint8, device=device)
    return copy_packed(arrays, packed)


def packed_bytes(arrays: Sequence[torch.Tensor]) -> int:
    """Bytes that `copy_packed` needs for these arrays."""
    return sum(_padded(array) for array in arrays)


def copy_packed(arrays: Sequence[torch.Tensor], packed: torch.Tensor) -> list[torch.Tensor]:
    """Copy the arrays side by side into `packed`, [bytes] uint8 on a GPU; returns views of it.

    Arrays of the same shapes and dtypes always land at the same addresses.
    """
    # Pinned memory comes from torch's own cache, which gives it out again after the copy only.
    host = torch.empty(packed_bytes(arrays), dtype=torch.uint8, pin_memory=True)
    views, start = [], 0
    for array in arrays:
        size = array.numel() * array.element_size()
        host[start : start + size].view(array.dtype).copy_(array.reshape(-1))
        views.append(packed[start : start + size].view(array.dtype).view(array.shape))
        start += _padded(array)
    packed[:start].copy_(host, non_blocking=True)
    return views


def _padded(array: torch.Tensor) -> int:
    return -(-array.numel() * array.element_size() // _ALIGNMENT) * _ALIGNMENT

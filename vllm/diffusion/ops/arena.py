# SPDX-License-Identifier: Apache-2.0
"""The door to `vmm_allocator`: device memory that is mapped where it is needed."""

from vmm_allocator import (
    Arena,
    InUseError,
    LimitError,
    OutOfMemoryError,
    TorchPool,
    VmmError,
    is_built,
)

__all__ = [
    "Arena",
    "InUseError",
    "LimitError",
    "OutOfMemoryError",
    "TorchPool",
    "VmmError",
    "is_built",
]

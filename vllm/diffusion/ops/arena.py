# SPDX-License-Identifier: Apache-2.0
"""`vmm_allocator` for the pool: device memory that is mapped on demand."""

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

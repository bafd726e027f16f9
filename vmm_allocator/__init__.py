# SPDX-License-Identifier: Apache-2.0
"""CUDA virtual memory: an address range that is backed by physical chunks where it is needed.

`Arena` is the range, `Arena.tensor` makes tensors on its memory, and `TorchPool` is a PyTorch
memory pool in it. Importing never fails: without the compiled module (`is_built`) or a driver,
making an `Arena` raises a typed error.
"""

from ._errors import (
    ClosedArenaError,
    DriverError,
    DriverUnavailableError,
    ForkedArenaError,
    InUseError,
    LimitError,
    NotBuiltError,
    OutOfMemoryError,
    ReservationError,
    VmmError,
)
from ._native import is_built
from .arena import DEFAULT_CHUNK_BYTES, Arena, Statistics
from .torch_pool import TorchPool

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "Arena",
    "ClosedArenaError",
    "DriverError",
    "DriverUnavailableError",
    "ForkedArenaError",
    "InUseError",
    "LimitError",
    "NotBuiltError",
    "OutOfMemoryError",
    "ReservationError",
    "Statistics",
    "TorchPool",
    "VmmError",
    "is_built",
]

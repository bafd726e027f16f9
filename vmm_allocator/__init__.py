# SPDX-License-Identifier: Apache-2.0
"""CUDA virtual memory: an address range of which only the parts in use are backed by memory.

`Arena` is the range, `Arena.tensor` makes tensors on its memory, and `TorchPool` is a PyTorch
memory pool in it. The import never fails. Without the compiled module (see `is_built`) or a driver,
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
from ._native import build_stamp, is_built
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
    "build_stamp",
    "is_built",
]

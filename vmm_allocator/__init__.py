# SPDX-License-Identifier: Apache-2.0
"""CUDA virtual memory: an address range that is backed by physical chunks as it grows.

Importing never fails: without the compiled module (`is_built`) or a driver, making an `Arena`
raises a typed error.
"""

from ._errors import (
    ClosedArenaError,
    DriverError,
    DriverUnavailableError,
    NotBuiltError,
    OutOfMemoryError,
    ReservationError,
    VmmError,
)
from .arena import DEFAULT_CHUNK_BYTES, Arena, Statistics, is_built

__all__ = [
    "DEFAULT_CHUNK_BYTES",
    "Arena",
    "ClosedArenaError",
    "DriverError",
    "DriverUnavailableError",
    "NotBuiltError",
    "OutOfMemoryError",
    "ReservationError",
    "Statistics",
    "VmmError",
    "is_built",
]

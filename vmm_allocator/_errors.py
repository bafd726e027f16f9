# SPDX-License-Identifier: Apache-2.0
"""Errors of the allocator::

VmmError
├── NotBuiltError            the compiled module is missing
├── DriverUnavailableError   there is no (recent enough) CUDA driver
├── DriverError              a call of the driver failed
├── OutOfMemoryError         the card has no room for the chunks
├── ReservationError         the address range is too small
└── ClosedArenaError         the arena has been closed
"""


class VmmError(RuntimeError):
    """Base of the errors of this package."""


class NotBuiltError(VmmError):
    """The compiled module is missing or does not load."""


class DriverUnavailableError(VmmError):
    """There is no CUDA driver on this machine, or it is too old or finds no device."""


class DriverError(VmmError):
    """A call of the CUDA driver failed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code  # CUresult


class OutOfMemoryError(VmmError):
    """The device has no memory for the chunks; nothing has changed."""

    def __init__(
        self, message: str, requested_bytes: int, mapped_bytes: int, free_bytes: int
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes  # mapped end that was asked for
        self.mapped_bytes = mapped_bytes  # mapped end, before and after
        self.free_bytes = free_bytes  # free memory of the device


class ReservationError(VmmError):
    """More was asked for than the reserved address range holds; nothing has changed."""

    def __init__(self, message: str, requested_bytes: int, reserved_bytes: int) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes


class ClosedArenaError(VmmError):
    """The arena has been closed."""

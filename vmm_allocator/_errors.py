# SPDX-License-Identifier: Apache-2.0
"""Errors of the allocator; errors about memory carry the requested and available bytes::

VmmError ├── NotBuiltError            the compiled module is missing ├── DriverUnavailableError
there is no CUDA driver, or one without virtual memory ├── DriverError              a call of the
driver failed ├── OutOfMemoryError         the card has no room for the chunks ├── LimitError
the arena's own limit has no room for the chunks ├── ReservationError         the address range is
too small ├── InUseError               a tensor or a graph still refers to the memory ├──
ClosedArenaError         the arena has been closed └── ForkedArenaError         the arena belongs to
the parent of this process
"""


class VmmError(RuntimeError):
    """Base of the errors of this package."""


class NotBuiltError(VmmError):
    """The compiled module is missing or does not load."""


class DriverUnavailableError(VmmError):
    """There is no CUDA driver, it is too old, or it has no device with virtual memory."""


class DriverError(VmmError):
    """A call of the CUDA driver failed."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code  # CUresult


class OutOfMemoryError(VmmError):
    """The device has no memory for the chunks; nothing has changed."""

    def __init__(
        self, message: str, requested_bytes: int, held_bytes: int, free_bytes: int
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes  # bytes of chunks that had to be created
        self.held_bytes = held_bytes  # bytes of the arena's chunks, mapped and spare
        self.free_bytes = free_bytes  # free memory of the device in bytes


class LimitError(VmmError):
    """The arena's limit does not allow these chunks; nothing has changed."""

    def __init__(
        self, message: str, requested_bytes: int, held_bytes: int, limit_bytes: int
    ) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes  # bytes of chunks that had to be created
        self.held_bytes = held_bytes  # bytes of the arena's chunks, mapped and spare
        self.limit_bytes = limit_bytes


class ReservationError(VmmError):
    """The request exceeds the reserved address range; nothing has changed."""

    def __init__(self, message: str, requested_bytes: int, reserved_bytes: int) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes


class InUseError(VmmError):
    """Memory to be unmapped or moved is still in use; nothing has changed."""

    def __init__(self, message: str, first_bytes: int, end_bytes: int) -> None:
        super().__init__(message)
        self.first_bytes = first_bytes  # offset of the first chunk in use within the range
        self.end_bytes = end_bytes  # offset of the end of the last chunk in use


class ClosedArenaError(VmmError):
    """The arena has been closed."""


class ForkedArenaError(VmmError):
    """The arena was created before a fork; a child process cannot use CUDA memory of its parent."""

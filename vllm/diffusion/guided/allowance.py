# SPDX-License-Identifier: Apache-2.0
"""Work that the compilation of one format may cost."""

from __future__ import annotations

import time

MAX_WORK = 5_000_000  # operations of one compilation, each of about a microsecond
MAX_SECONDS = 60.0  # of one compilation, whatever else the machine does


class TooLargeError(ValueError):
    """A language exceeds a limit; the message has the numbers."""


class OutOfWorkError(TooLargeError):
    """A compilation has used up its operations."""


class OutOfTimeError(TooLargeError):
    """A compilation has taken too long, which it may not do on another day."""


class CancelledError(Exception):
    """Nobody waits for the language any more."""


class Allowance:
    """Bounds the work of one compilation; any thread may end it.

    Args:
        work: operations that the compilation may use.
    """

    def __init__(self, work: int = MAX_WORK) -> None:
        self._work, self._left = work, work
        self._deadline = time.monotonic() + MAX_SECONDS
        self._is_cancelled = False

    def spend(self, work: int) -> None:
        """Count operations before they are done.

        Raises:
            TooLargeError: no more operations, or no more time, are left.
            CancelledError: the compilation is to end.
        """
        self._left -= work
        if self._left < 0:
            raise OutOfWorkError(f"it takes more than {self._work} operations to compile")
        if self._is_cancelled:
            raise CancelledError
        if time.monotonic() > self._deadline:
            raise OutOfTimeError(f"it takes more than {MAX_SECONDS:.0f} s to compile")

    def cancel(self) -> None:
        """Let the next `spend` raise `CancelledError`."""
        self._is_cancelled = True

# SPDX-License-Identifier: Apache-2.0
"""Limits on the work of compiling one format."""

from __future__ import annotations

import time

MAX_WORK = 5_000_000  # operations of one compilation, about a microsecond each
MAX_SECONDS = 60.0  # seconds of one compilation, even if the machine is busy


class TooLargeError(ValueError):
    """A language exceeds a limit; the message contains the numbers."""


class OutOfWorkError(TooLargeError):
    """A compilation has used up its operations."""


class OutOfTimeError(TooLargeError):
    """A compilation has taken too long; it may succeed when the machine is less busy."""


class CancelledError(Exception):
    """No request waits for the language any more."""


class Allowance:
    """Limits the operations and the time of one compilation, which any thread may cancel."""

    def __init__(self, work: int = MAX_WORK) -> None:
        self._work, self._left = work, work
        self._deadline = time.monotonic() + MAX_SECONDS
        self._is_cancelled = False

    def spend(self, work: int) -> None:
        """Count operations before they are run.

        Raises:
            TooLargeError: no operations or no time are left.
            CancelledError: the compilation has been cancelled.
        """
        self._left -= work
        if self._left < 0:
            raise OutOfWorkError(f"it takes more than {self._work} operations to compile")
        if self._is_cancelled:
            raise CancelledError
        if time.monotonic() > self._deadline:
            raise OutOfTimeError(f"it takes more than {MAX_SECONDS:.0f} s to compile")

    def cancel(self) -> None:
        """Make the next `spend` raise `CancelledError`."""
        self._is_cancelled = True

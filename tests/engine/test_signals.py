# SPDX-License-Identifier: Apache-2.0
"""A signal reaches an engine that waits for requests."""

from __future__ import annotations

import os
import queue
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from vllm.diffusion.engine.worker import _restore_signal_handlers

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stopped(Exception):
    """Raised by the handler."""


@pytest.fixture
def handler() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("handler")
def test_a_library_that_lets_waits_go_on_after_a_signal_does_not_keep_the_engine() -> None:
    signal.siginterrupt(signal.SIGTERM, False)  # as a library's handler around Python's may be
    _restore_signal_handlers()
    waiting: queue.Queue[None] = queue.Queue()
    killing = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    waking = threading.Timer(5.0, waiting.put, (None,))  # a wait with a timeout is another one
    killing.start()
    waking.start()
    with pytest.raises(Stopped):
        waiting.get()
    assert waking.is_alive(), "the signal was seen only when something else ended the wait"
    waking.cancel()


def test_what_python_does_not_handle_stays_as_it_is() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        _restore_signal_handlers()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)

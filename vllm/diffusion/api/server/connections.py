# SPDX-License-Identifier: Apache-2.0
"""Limits of one HTTP connection: the time in which a request must arrive, and the size of its
head.

uvicorn waits without limit for the rest of a request, and accepts headers of any size.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn import config as uvicorn_config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm.diffusion.core import envs

if TYPE_CHECKING:
    import asyncio
    from argparse import Namespace


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which closes connections whose requests exceed a limit.

    Attributes:
        receive_timeout_s: seconds within which a whole request must arrive, counted from the
            opening of the connection or the first byte of a later request.
        max_head_bytes: maximum bytes of the request line and all headers.
        max_headers: maximum number of headers.
    """

    receive_timeout_s = 60.0
    max_head_bytes = 1 << 22
    max_headers = 256

    _timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head(len(name) + len(value))

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.max_head_bytes or len(self.headers) > self.max_headers:
            self._close(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def _start_timer(self) -> None:
        self._stop_timer()
        late = HTTPStatus.REQUEST_TIMEOUT
        self._timer = self.loop.call_later(self.receive_timeout_s, self._close, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self, status: HTTPStatus) -> None:
        """Send a response with a status, unless a response has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: 0\r\n\r\n".encode())
        self.transport.close()


def install(args: Namespace) -> None:
    """Make the servers of this process use `LimitedProtocol`, with the limits of `args`."""
    limits: dict[str, Any] = {
        "receive_timeout_s": envs.receive_timeout_s(),
        "max_head_bytes": args.h11_max_incomplete_event_size,
        "max_headers": args.h11_max_header_count,
    }
    for name, value in limits.items():
        setattr(LimitedProtocol, name, value)
    uvicorn_config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{LimitedProtocol.__name__}"

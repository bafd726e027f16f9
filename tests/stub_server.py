# SPDX-License-Identifier: Apache-2.0
"""An HTTP server for a single test that records its requests."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Stub(ThreadingHTTPServer):
    """Answers with `reply`, and records paths and JSON bodies of POST requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: list[tuple[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        """Return status and content (text, or a JSON value); the body is None for GET."""
        raise NotImplementedError

    @contextmanager
    def serving(self) -> Iterator[Self]:
        with self:
            threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
            yield self
            self.shutdown()


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        self.answer(None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append((self.path, body))
        self.answer(body)

    def answer(self, body: Any) -> None:
        status, content = self.server.reply(self.path, body)
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""

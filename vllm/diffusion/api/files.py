# SPDX-License-Identifier: Apache-2.0
"""Files of the web pages, served unchanged: no build step, and no resources from other hosts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi.responses import Response

if TYPE_CHECKING:
    from pathlib import Path

    from fastapi import Request

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class WebFile:
    """A file of a web page, with the headers of its responses.

    Attributes:
        pictures: allowed image sources of the page, in the syntax of `Content-Security-Policy`.
    """

    content: bytes
    media_type: str
    etag: str
    pictures: str

    @classmethod
    def read(cls, path: Path, pictures: str = "'self'") -> WebFile:
        """Read the file at `path`, whose suffix determines its media type."""
        content = path.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        return cls(content, _TYPES[path.suffix], etag, pictures)

    def response(self, request: Request) -> Response:
        """Return the file, or status 304 if the client's cached copy is current."""
        policy = (
            "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
            f"img-src {self.pictures}; connect-src 'self'; form-action 'none'; base-uri 'none'; "
            "frame-ancestors 'none'"
        )
        headers = {**_HEADERS, "Content-Security-Policy": policy, "ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)

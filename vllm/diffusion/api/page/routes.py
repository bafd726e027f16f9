# SPDX-License-Identifier: Apache-2.0
"""The routes of the pages. Files need no key; what tells of the server's work does."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vllm.diffusion.api.page.status import Status

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_PAGES = {"/": "index.html", "/status": "status.html"}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class _File:
    content: bytes
    media_type: str
    etag: str

    def response(self, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')


_FILES = {path.name: _read(path) for path in sorted(STATIC.iterdir())}

# Answered without a key: they hold nothing that is not in the source.
OPEN_PATHS = frozenset({*_PAGES, *(f"/page/{name}" for name in _FILES)})


@router.get("/")
async def page(raw_request: Request) -> Response:
    """Where one asks, and watches the canvas."""
    return _FILES[_PAGES["/"]].response(raw_request)


@router.get("/status")
async def status_page(raw_request: Request) -> Response:
    """What the server is doing."""
    return _FILES[_PAGES["/status"]].response(raw_request)


@router.get("/status.json")
async def status(raw_request: Request) -> JSONResponse:
    """What that page shows, beside the metrics."""
    found: Status = raw_request.app.state.diffusion_status
    return JSONResponse(await found.now())


@router.get("/page/options.json")
async def options(raw_request: Request) -> JSONResponse:
    """The tables of algorithms and parameters, as the served model has them."""
    found: dict[str, Any] = raw_request.app.state.diffusion_page_options
    return JSONResponse(found)


@router.get("/page/{name}")
async def file(name: str, raw_request: Request) -> Response:
    """A part of the pages."""
    if name not in _FILES:
        raise HTTPException(404)
    return _FILES[name].response(raw_request)


def install(app: FastAPI, options: dict[str, Any], status: Status) -> None:
    """Serve the pages.

    Args:
        app: the application.
        options: `options.page_options` of the served model.
        status: of its engine.
    """
    app.state.diffusion_page_options = options
    app.state.diffusion_status = status
    app.include_router(router)

# SPDX-License-Identifier: Apache-2.0
"""Offline version of FastAPI's page at `/docs`, whose library would load from another host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, HTTPException, Request, Response

from vllm.diffusion import __version__
from vllm.diffusion.api.documentation.route_groups import arrange
from vllm.diffusion.api.files import WebFile
from vllm.diffusion.api.page.site import STATIC as PAGE
from vllm.entrypoints.serve.instrumentator import offline_docs

if TYPE_CHECKING:
    from fastapi import FastAPI

STATIC = Path(__file__).parent / "static"
SWAGGER_UI = Path(offline_docs.__file__).parent / "static"  # upstream's copy of the library

# pictures as data URLs in the style sheet
_PAGE = WebFile.read(STATIC / "docs.html", pictures="'self' data:")
_FILES = {
    path.name: WebFile.read(path)
    for path in (
        STATIC / "docs.js",
        PAGE / "mark.svg",
        SWAGGER_UI / "swagger-ui-bundle.js",
        SWAGGER_UI / "swagger-ui.css",
    )
}

# Paths that are served without an API key.
OPEN_PATHS = frozenset({"/docs", "/openapi.json", *(f"/docs/{name}" for name in _FILES)})

router = APIRouter(include_in_schema=False)


@router.get("/docs")
async def docs(raw_request: Request) -> Response:
    return _PAGE.response(raw_request)


@router.get("/docs/{name}")
async def file(name: str, raw_request: Request) -> Response:
    if name not in _FILES:
        raise HTTPException(404)
    return _FILES[name].response(raw_request)


@router.get("/redoc")
async def redoc() -> None:
    """Answer 404 instead of FastAPI's page, which loads its library from another host."""
    raise HTTPException(404)


def install(app: FastAPI, *, has_keys: bool) -> None:
    """Add the page to the application, unless `--disable-fastapi-docs` is given.

    With `has_keys`, the page asks for the API key and sends it.
    """
    if app.openapi_url is None:
        return
    app.router.routes[:0] = router.routes
    app.title, app.version = "Mosaic", __version__
    upstreams_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = upstreams_openapi()
        arrange(document)
        if has_keys:
            schemes = document.setdefault("components", {}).setdefault("securitySchemes", {})
            schemes["api_key"] = {"type": "http", "scheme": "bearer"}
            document["security"] = [{"api_key": []}]
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    app.openapi_schema = None

# SPDX-License-Identifier: Apache-2.0
"""Middleware around every HTTP request: request id, API key, limits and access log."""

from __future__ import annotations

import logging
import re
import time
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from starlette.datastructures import Headers, MutableHeaders

from vllm import envs as upstream_envs
from vllm.diffusion.api.documentation.offline_docs import OPEN_PATHS as _DOCUMENTATION_PATHS
from vllm.diffusion.api.page.site import OPEN_PATHS as _PAGE_PATHS
from vllm.diffusion.api.prometheus import count_refusal
from vllm.diffusion.api.server import refusals
from vllm.diffusion.core import envs
from vllm.entrypoints.generate.base.serving import PRIORITY_HEADER
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.logger import init_logger

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Collection

    from fastapi import FastAPI
    from starlette.responses import JSONResponse
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from vllm.diffusion.api.server.lifecycle import Lifecycle

logger = init_logger(__name__)

REQUEST_ID = "X-Request-Id"
_MAX_ID_LENGTH = 128
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_JSON = "application/json"
_CLOSED_BY_CLIENT = 499  # status that web servers log if the client left before an answer
# Probes, metrics and page files: they need no key, and they are served while the server shuts
# down.
_OPEN_PATHS = frozenset(
    {
        *_PAGE_PATHS,
        *_DOCUMENTATION_PATHS,
        *("/health", "/ready", "/ping", "/metrics", "/version", "/load"),
    }
)


class Refusal(NamedTuple):
    """An error answer without a route; `reason` is the label under which it is counted."""

    status: HTTPStatus
    reason: str
    message: str

    def response(self, request: Request) -> JSONResponse:
        error = create_error_response(self.message, self.status.phrase, self.status)
        headers = {}
        if self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers = {"Retry-After": "5", "Connection": "close"}
        return refusals.answer(request, error, headers)


class Gate:
    """ASGI middleware that checks key, origin, shutdown, priority and body size, in this order.

    Args:
        lifecycle: decides when no requests are accepted any more.
        api_keys: valid keys; if empty, no key is required. Upstream's own check selects routes by
            prefix, so some requests without a key would reach the engine.
        origins: origins of web pages that may use this server, or `*`.
        max_body_bytes: maximum size of a body in bytes.
    """

    def __init__(
        self,
        app: ASGIApp,
        lifecycle: Lifecycle,
        api_keys: list[str],
        origins: Collection[str],
        max_body_bytes: int,
    ) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._lifecycle = lifecycle
        self._keys = AuthenticationMiddleware(app, api_keys) if api_keys else None
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] == "OPTIONS" or path in _OPEN_PATHS:
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            count_refusal(refusal.reason)
            return await refusal.response(Request(scope))(scope, receive, send)
        if scope["method"] in ("GET", "HEAD"):
            return await self._app(scope, receive, send)
        with self._lifecycle.open_request():
            await self._app(scope, self._limited(receive), send)

    def _has_key(self, keys: AuthenticationMiddleware, scope: Scope) -> bool:
        """Return whether a request has a valid key, in a header of OpenAI's or Anthropic's clients.

        The header is converted to OpenAI's form, the only one that upstream's inner middleware
        supports.
        """
        headers = MutableHeaders(scope=scope)
        api_key = headers.get("x-api-key")
        if api_key is not None and "authorization" not in headers:
            headers["Authorization"] = f"Bearer {api_key}"
        return bool(keys.verify_token(headers))

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        if self._keys is not None and not self._has_key(self._keys, scope):
            message = (
                "wanted an Authorization header with a valid API key: `Bearer KEY`, or x-api-key"
            )
            return Refusal(HTTPStatus.UNAUTHORIZED, "api_key", message)
        if self._is_forged(scope["method"], headers):
            given = headers.get("origin", "none")
            message = f"Origin: given {given!r}; wanted one of --allowed-origins, or JSON"
            return Refusal(HTTPStatus.FORBIDDEN, "origin", message)
        leaving = self._lifecycle.refusal
        if leaving is not None and scope["method"] not in ("GET", "HEAD"):
            return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "draining", leaving)
        priority = headers.get(PRIORITY_HEADER, "0")
        # Upstream's routes would ignore an invalid value.
        if not _INTEGER.fullmatch(priority):
            message = f"{PRIORITY_HEADER}: given {priority!r}; wanted an integer"
            return Refusal(HTTPStatus.BAD_REQUEST, "priority", message)
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            return self._too_large()
        return None

    def _is_forged(self, method: str, headers: Headers) -> bool:
        """Return whether another origin's page sends the request without the browser's permission.

        Browsers ask for permission before they send JSON, but never for a form or an empty body.
        """
        if method in ("GET", "HEAD") or headers.get("content-type", "").startswith(_JSON):
            return False
        origin = headers.get("origin")
        if "*" in self._origins or origin in self._origins:
            return False
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site in ("cross-site", "same-site")
        return origin is not None and urlsplit(origin).netloc != headers.get("host")

    def _too_large(self) -> Refusal:
        message = (
            f"body: wanted at most {self._max_body_bytes} bytes "
            "(DLLM_MAX_REQUEST_BYTES of the server)"
        )
        return Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_size", message)

    def _limited(self, receive: Receive) -> Receive:
        """Wrap `receive` to refuse a body that is too large but has no Content-Length header."""
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                refusal = self._too_large()
                count_refusal(refusal.reason)
                raise HTTPException(refusal.status, refusal.message)
            return message

        return limited


class AccessLog:
    """ASGI middleware that gives every request an id, adds it to the answer and logs it.

    A client's own `X-Request-Id` is kept. The log line is written when the answer is complete.

    Args:
        excluded_paths: paths that are not logged.
        enabled: whether to log; if False, only ids are added.
    """

    def __init__(self, app: ASGIApp, excluded_paths: frozenset[str], enabled: bool) -> None:
        self._app = app
        self._excluded_paths = excluded_paths
        self._enabled = enabled and logger.isEnabledFor(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start = time.perf_counter()
        status = _CLOSED_BY_CLIENT
        request_id = _take_or_give_id(scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._enabled and scope["path"] not in self._excluded_paths:
                logger.info(
                    '%s "%s %s" %d %.3f s id=%s',
                    ":".join(map(str, scope.get("client") or ("-",))),
                    scope["method"],
                    scope.get("raw_path", b"-").decode("ascii", "replace"),
                    status,
                    time.perf_counter() - start,
                    request_id,
                )


def _take_or_give_id(scope: Scope) -> str:
    """Return the request's id; generate one if the client sent none, or an unloggable one."""
    headers = MutableHeaders(scope=scope)
    sent = headers.get(REQUEST_ID, "")
    if not sent or len(sent) > _MAX_ID_LENGTH or not sent.isprintable():
        headers[REQUEST_ID] = uuid.uuid4().hex
    return headers[REQUEST_ID]


def keys_of(args: Namespace) -> list[str]:
    """Return the API keys from the command line, or else from the environment; may be empty."""
    return [key for key in args.api_key or [upstream_envs.VLLM_API_KEY] if key]


def install(app: FastAPI, lifecycle: Lifecycle, args: Namespace) -> None:
    """Put gate and access log around the whole application, including upstream's middleware.

    The stack is built here, because the application refuses `add_middleware` at this point. Our
    log replaces uvicorn's access log, which has no request ids.
    """
    inner = app.build_middleware_stack()  # includes the exception handlers installed so far
    excluded = (args.disable_access_log_for_endpoints or "").split(",")
    app.middleware_stack = AccessLog(
        Gate(inner, lifecycle, keys_of(args), args.allowed_origins, envs.max_request_bytes()),
        excluded_paths=frozenset(path.strip() for path in excluded),
        enabled=not args.disable_uvicorn_access_log,
    )
    logging.getLogger("uvicorn.access").addFilter(_drop)


def _drop(record: logging.LogRecord) -> bool:
    """Drop every record. This is a filter, because uvicorn configures its logger again later."""
    return False

# SPDX-License-Identifier: Apache-2.0
"""`POST /invocations`, SageMaker's one route: each body goes to the route that it is written for.

Upstream's route calls the handlers of other routes directly, past the checks of these routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}  # by a field of theirs


class Forwarded(Response):
    """The answer of another route of the application to a body.

    Args:
        app: routes of the application, without its middleware, which has been passed.
        path: of the other route.
        body: the body as sent.
    """

    def __init__(self, app: ASGIApp, path: str, body: bytes) -> None:
        super().__init__()
        self._app, self._path, self._body = app, path, body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("root_path", "") + self._path
        is_sent = False

        async def replay() -> Message:
            nonlocal is_sent
            if is_sent:
                return await receive()  # which waits until the client leaves
            is_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}

        other = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(other, replay, send)


async def forward(raw_request: Request) -> Response:
    """Hand a body on to the route whose field it has.

    Raises:
        RequestRefused: it has a field of neither.
    """
    body = await raw_request.json()
    for field, path in _ROUTES.items():
        if isinstance(body, dict) and field in body:
            return Forwarded(raw_request.app.router, path, await raw_request.body())
    wanted = f"wanted an object with {' or '.join(_ROUTES)}"
    raise RequestRefused(InvalidParameterError("body", body, wanted))

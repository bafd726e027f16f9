# SPDX-License-Identifier: Apache-2.0
"""`POST /invocations`, SageMaker's only route, which forwards each body to the matching route.

Upstream's route calls the handlers of other routes directly and so skips the checks of the routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response

from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# by a field that identifies the body
_ROUTES = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


class Forwarded(Response):
    """A response that another route of the application makes from a body.

    Args:
        app: routes of the application, without its middleware, which has already run.
        path: path of the other route.
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
                return await receive()  # waits until the client disconnects
            is_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}

        other = {**scope, "path": path, "raw_path": path.encode()}
        await self._app(other, replay, send)


async def forward(raw_request: Request) -> Response:
    """Forward a body to the route that its fields identify.

    Raises:
        RequestRefused: it has no field of a known route.
    """
    body = await raw_request.json()
    for field, path in _ROUTES.items():
        if isinstance(body, dict) and field in body:
            return Forwarded(raw_request.app.router, path, await raw_request.body())
    wanted = f"wanted an object with {' or '.join(_ROUTES)}"
    raise RequestRefused(InvalidParameterError("body", body, wanted))

# SPDX-License-Identifier: Apache-2.0
"""Mosaic on Ray Serve, whose replicas are whole servers; docs/fleet.md has the command."""

import shlex
import sys
from types import SimpleNamespace

from fastapi import FastAPI, Request
from ray import serve
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

routes = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
SCALING = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 8}


class Handed(Response):
    """Hands a request on to the application of the replica."""

    background = None

    def __init__(self, app: ASGIApp) -> None:
        self.handle = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.handle(scope, receive, send)


@serve.deployment(autoscaling_config=SCALING, max_ongoing_requests=256, health_check_period_s=2)
@serve.ingress(routes)
class Mosaic:
    """One engine, and upstream's application with Mosaic's routes."""

    async def __init__(self, model: str, arguments: str) -> None:
        from vllm.entrypoints.launchers.api_server import entry

        from vllm.entrypoints import api_server

        sys.argv = ["mosaic", "--model", model, *shlex.split(arguments)]
        args = api_server.parse_arguments()
        self._running = entry.build_async_engine_client(args)
        engine = await self._running.__aenter__()
        tasks = await engine.get_supported_tasks()
        self._app = entry.build_app(args, tasks, engine.model_config)
        self._app.state.server = SimpleNamespace(should_exit=False)
        await entry.init_app_state(engine, self._app.state, args, tasks)

    async def check_health(self) -> None:
        if await self._app.state.diffusion_lifecycle.state() == "dead":
            raise RuntimeError("the engine of this replica is gone")

    @routes.api_route("/{path:path}", methods=["GET", "POST", "DELETE", "OPTIONS", "HEAD"])
    async def handle(self, request: Request) -> Response:
        return Handed(self._app)


def app(args: dict[str, str]) -> serve.Application:
    server = Mosaic.options(ray_actor_options={"num_gpus": float(args.get("gpus", "0"))})
    return server.bind(args["model"], args.get("arguments", ""))

# SPDX-License-Identifier: Apache-2.0
"""Checks of requests that trainers send to upstream's routes.

Upstream ignores unknown fields, so a misspelt field would have the effect of a missing one: abort
every request, set no label, or wake nothing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fastapi import Depends, Request

from vllm import envs as upstream_envs
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.fields import near_miss, unknown
from vllm.entrypoints.rl.online.api_router import router as online
from vllm.entrypoints.serve.dev.sleep.api_router import router as sleeping

if TYPE_CHECKING:
    from fastapi import FastAPI

_ABORT = "/abort_requests"
# fields that upstream reads from the request itself
_READ = {_ABORT: {"request_ids"}, "/wake_up": {"tags"}}
_TAGS = ("kv_cache", "scheduling", "weights")


def attach(app: FastAPI) -> None:
    """Add upstream's routes with a check before its own ones, if upstream serves them."""
    if upstream_envs.VLLM_SERVER_DEV_MODE:
        for router in (online, sleeping):
            app.include_router(router, dependencies=[Depends(_check)])


async def _check(raw_request: Request) -> None:
    """Refuse misspelt fields, any unknown field of an abort, and unknown tags."""
    route = raw_request.scope["route"]
    path, fields = route.path, (*route.dependant.query_params, *route.dependant.body_params)
    known = {field.alias for field in fields} | _READ.get(path, set())
    given: dict[str, Any] = dict(raw_request.query_params)
    # Upstream's own check of the JSON follows.
    with suppress(ValueError):
        body = await raw_request.json() if await raw_request.body() else None
        given |= body if isinstance(body, dict) else {}
    for name, value in given.items():
        if name not in known and (path == _ABORT or near_miss(name, known)):
            raise RequestRefused(unknown(name, value, known))
    for tag in raw_request.query_params.getlist("tags") if "tags" in known else ():
        if tag not in _TAGS:
            wanted = f"wanted one of {', '.join(_TAGS)}"
            raise RequestRefused(InvalidParameterError("tags", tag, wanted))

# SPDX-License-Identifier: Apache-2.0
"""Checks of what trainers send to upstream's routes.

Upstream passes over what it does not know, and a misspelt field does what its absence does: end
every request, give no label, wake nothing.
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
_READ = {_ABORT: {"request_ids"}, "/wake_up": {"tags"}}  # by upstream from the request itself
_TAGS = ("kv_cache", "scheduling", "weights")


def attach(app: FastAPI) -> None:
    """Put upstream's routes, where it will have them, before its own, with a check in front."""
    if upstream_envs.VLLM_SERVER_DEV_MODE:
        for router in (online, sleeping):
            app.include_router(router, dependencies=[Depends(_check)])


async def _check(raw_request: Request) -> None:
    """Refuse what is almost a field, any other field of an abort, and what nothing is tagged with.

    Raises:
        RequestRefused: HTTP 400, naming the field.
    """
    route = raw_request.scope["route"]
    path, fields = route.path, (*route.dependant.query_params, *route.dependant.body_params)
    known = {field.alias for field in fields} | _READ.get(path, set())
    given: dict[str, Any] = dict(raw_request.query_params)
    with suppress(ValueError):  # upstream's check of JSON follows
        body = await raw_request.json() if await raw_request.body() else None
        given |= body if isinstance(body, dict) else {}
    for name, value in given.items():
        if name not in known and (path == _ABORT or near_miss(name, known)):
            raise RequestRefused(unknown(name, value, known))
    for tag in raw_request.query_params.getlist("tags") if "tags" in known else ():
        if tag not in _TAGS:
            wanted = f"wanted one of {', '.join(_TAGS)}"
            raise RequestRefused(InvalidParameterError("tags", tag, wanted))

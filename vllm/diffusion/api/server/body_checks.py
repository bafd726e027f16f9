# SPDX-License-Identifier: Apache-2.0
"""Dependencies of routes that check a body as the client sent it, before it is parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import Depends, Request

from vllm.diffusion.api.bodies import check_model_name, check_num_answers
from vllm.diffusion.api.server import adapter_routes
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

if TYPE_CHECKING:
    from collections.abc import Callable

# Error answers of the routes that run the model, for their documentation.
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse},
    404: {"model": ErrorResponse},
    500: {"model": ErrorResponse},
    504: {"model": ErrorResponse, "description": "not complete within `timeout_s`"},
}


def checked_by(*checks: Callable[[Any], None]) -> list[Any]:
    """Return the dependencies of a route: checks of every body, and the given checks."""

    async def check(raw_request: Request) -> None:
        body = await raw_request.json() if await raw_request.body() else None
        if isinstance(body, dict):
            try:
                for one in (check_model_name, *checks, check_num_answers):
                    one(body)
            except InvalidParameterError as error:
                raise RequestRefused(error) from None
            await adapter_routes.choose(raw_request.app.state, body)

    return [Depends(validate_json_request), Depends(check)]

# SPDX-License-Identifier: Apache-2.0
"""Routes that revise texts, in the form of Inception's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request

from vllm.diffusion.api.bodies import check_body
from vllm.diffusion.api.documentation.examples import shown
from vllm.diffusion.api.editing import fim
from vllm.diffusion.api.openai.openai_protocol import CompletionAnswer
from vllm.diffusion.api.server.body_checks import ERRORS, checked_by
from vllm.entrypoints.openai.completion.api_router import create_completion

if TYPE_CHECKING:
    from fastapi import FastAPI

router = APIRouter()


def attach(app: FastAPI) -> None:
    """Add the routes."""
    app.include_router(router)


@router.post(
    "/v1/fim/completions",
    dependencies=checked_by(fim.check, check_body),
    response_model=None,
    responses={200: {"model": CompletionAnswer, "content": {"text/event-stream": {}}}, **ERRORS},
    openapi_extra=shown("/v1/fim/completions"),
)
async def fill_in_the_middle(request: fim.FimBody, raw_request: Request) -> Any:  # type: ignore[valid-type]
    """Return the text between a prompt and a suffix."""
    return await create_completion(request, raw_request)

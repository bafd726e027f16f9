# SPDX-License-Identifier: Apache-2.0
"""Routes that revise texts, in the form of Inception's API."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from vllm.diffusion.api.bodies import check_body
from vllm.diffusion.api.documentation.examples import shown
from vllm.diffusion.api.editing import fim, revisions
from vllm.diffusion.api.openai.openai_protocol import ChatAnswer, CompletionAnswer
from vllm.diffusion.api.server import refusals
from vllm.diffusion.api.server.body_checks import ERRORS, checked_by
from vllm.diffusion.api.streams import DONE, event
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, with_cancellation

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@router.post(
    "/v1/edit/completions",
    dependencies=checked_by(revisions.check, check_body),
    response_model=None,
    responses={200: {"model": ChatAnswer, "content": {"text/event-stream": {}}}, **ERRORS},
    openapi_extra=shown("/v1/edit/completions"),
)
@with_cancellation
@load_aware_call
async def edit(request: revisions.EditBody, raw_request: Request) -> Response:  # type: ignore[valid-type]
    """Return the code to edit, with the next edit around the cursor."""
    body = await raw_request.json()
    return _answer(await _handler(raw_request).edit(body, raw_request), body, raw_request)


@router.post(
    "/v1/apply/completions",
    dependencies=checked_by(revisions.check, check_body),
    response_model=None,
    responses={200: {"model": ChatAnswer, "content": {"text/event-stream": {}}}, **ERRORS},
    openapi_extra=shown("/v1/apply/completions"),
)
@with_cancellation
@load_aware_call
async def apply(request: revisions.ApplyBody, raw_request: Request) -> Response:  # type: ignore[valid-type]
    """Return the original code with the changes of a snippet."""
    body = await raw_request.json()
    return _answer(await _handler(raw_request).apply(body, raw_request), body, raw_request)


def _handler(raw_request: Request) -> revisions.RevisionHandler:
    handler: revisions.RevisionHandler = raw_request.app.state.diffusion_revisions
    return handler


def _answer(answer: Any, body: dict[str, Any], raw_request: Request) -> Response:
    """Return an answer as JSON, or as the stream that the body asks for."""
    if isinstance(answer, ErrorResponse):
        return refusals.answer(raw_request, answer)
    if not body.get("stream"):
        return JSONResponse(answer)
    options = body.get("stream_options") or {}
    chunks = revisions.chunks_of(answer, has_usage=bool(options.get("include_usage")))
    return StreamingResponse(_events(chunks), media_type="text/event-stream")


def _events(chunks: list[dict[str, Any]]) -> Iterator[str]:
    for chunk in chunks:
        yield event(json.dumps(chunk))
    yield DONE

# SPDX-License-Identifier: Apache-2.0
"""Upstream's routes that read conversations, with our conversion, and `GET /v1/models/ID`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse

from vllm.diffusion.api.conversations import read_chat
from vllm.diffusion.api.openai.openai_protocol import ChatCompletionBody  # noqa: TC001 (FastAPI reads it)
from vllm.diffusion.api.schema import body_class
from vllm.diffusion.api.server import adapter_routes
from vllm.entrypoints.scale_out.render.api_router import render_chat_completion
from vllm.entrypoints.serve.tokenize.api_router import tokenize
from vllm.entrypoints.serve.tokenize.protocol import (
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
)
from vllm.entrypoints.serve.utils.api_utils import validate_json_request
from vllm.exceptions import VLLMNotFoundError

if TYPE_CHECKING:
    from fastapi import FastAPI

_RENDER = "/v1/chat/completions/render"
_JSON = [Depends(validate_json_request)]
router, rendering = APIRouter(), APIRouter()


def _read_chat(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "messages": read_chat(body["messages"])} if "messages" in body else body


TokenizeChatBody = body_class(
    TokenizeChatRequest, "TokenizeChatBody", "A conversation to tokenise.", _read_chat
)


def attach(app: FastAPI) -> None:
    """Add the routes to `app`. The route for rendering is added only if upstream has it."""
    app.include_router(router)
    if any(getattr(route, "endpoint", None) is render_chat_completion for route in app.routes):
        app.include_router(rendering)


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, raw_request: Request) -> JSONResponse:
    """Return one of the served models by its name."""
    served = await raw_request.app.state.openai_serving_models.show_available_models()
    for card in served.data:
        if card.id == model_id:
            return JSONResponse(card.model_dump())
    names = ", ".join(card.id for card in served.data)
    raise VLLMNotFoundError(f"model: given {model_id!r}; wanted one of: {names}")


@router.post(
    "/tokenize",
    dependencies=[*_JSON, Depends(adapter_routes.choose_model_of)],
    response_model=TokenizeResponse,
)
async def tokenise(
    request: TokenizeCompletionRequest | TokenizeChatBody,  # type: ignore[valid-type]
    raw_request: Request,
) -> Any:
    """Return the tokens of a text or of a conversation."""
    return await tokenize(request, raw_request)


@rendering.post(_RENDER, dependencies=_JSON, response_model=None)
async def render_chat(request: ChatCompletionBody, raw_request: Request) -> Any:  # type: ignore[valid-type]
    """Return what the engine would receive for a chat completion."""
    await raw_request.app.state.openai_serving_chat.prepare(request)
    return await render_chat_completion(request, raw_request)

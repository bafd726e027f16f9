# SPDX-License-Identifier: Apache-2.0
"""Routes that load and unload LoRA adapters while the server runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from pydantic import ConfigDict

from vllm import envs as upstream_envs
from vllm.diffusion.adapters.lora_flags import reader_of
from vllm.diffusion.api.adapter_requests import choose_model
from vllm.diffusion.api.openai.adapter_models import AdapterModels
from vllm.diffusion.config import settings_of
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.entrypoints.serve.utils.api_utils import validate_json_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fastapi import FastAPI

    from vllm.diffusion.api.validator import Validator

router = APIRouter()
_JSON = [Depends(validate_json_request)]
_ANSWERS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse},
    404: {"model": ErrorResponse},
}


class LoadAdapterBody(LoadLoRAAdapterRequest):
    """Body of POST /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="forbid")


class UnloadAdapterBody(UnloadLoRAAdapterRequest):
    """Body of POST /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="forbid")


def attach(app: FastAPI) -> None:
    """Add the routes in place of upstream's, if the environment allows them."""
    if upstream_envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING:
        app.include_router(router)


def install(state: Any, validator: Validator) -> None:
    """Change upstream's list of models, which every handler has, to ours."""
    models = state.openai_serving_models
    vllm_config = models.engine_client.vllm_config
    models.__class__ = AdapterModels
    models.validator, models.reader = validator, reader_of(vllm_config)
    models.adapter_root = settings_of(vllm_config).adapter_root
    models.staging = asyncio.Lock()
    for adapter in models.lora_requests.values():
        validator.adapters.note(adapter)


async def choose(state: Any, body: Mapping[str, Any]) -> None:
    """Set the adapter of a request by its body.

    Raises:
        VLLMNotFoundError: HTTP 404, for a model that is not served.
    """
    models = getattr(state, "openai_serving_models", None)
    if isinstance(models, AdapterModels):
        await choose_model(models, body.get("model"))


async def choose_model_of(raw_request: Request) -> None:
    """Set the adapter of a request, as `choose`."""
    body = await raw_request.json() if await raw_request.body() else None
    if isinstance(body, dict):
        await choose(raw_request.app.state, body)


@router.post("/v1/load_lora_adapter", dependencies=_JSON, response_model=None, responses=_ANSWERS)
async def load_lora_adapter(request: LoadAdapterBody, raw_request: Request) -> Response:
    """Load an adapter from a folder; `load_inplace` replaces the adapter of that name."""
    return _answer(await raw_request.app.state.openai_serving_models.load_lora_adapter(request))


@router.post("/v1/unload_lora_adapter", dependencies=_JSON, response_model=None, responses=_ANSWERS)
async def unload_lora_adapter(request: UnloadAdapterBody, raw_request: Request) -> Response:
    """Unload an adapter; requests that have it end with it."""
    return _answer(await raw_request.app.state.openai_serving_models.unload_lora_adapter(request))


def _answer(result: ErrorResponse | str) -> Response:
    if isinstance(result, ErrorResponse):
        return JSONResponse(result.model_dump(), result.error.code)
    return Response(result)

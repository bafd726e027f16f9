# SPDX-License-Identifier: Apache-2.0
"""HTTP routes of Mosaic, as an endpoint plugin of upstream's server."""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.middleware import Middleware

from vllm.diffusion import __version__
from vllm.diffusion.api import prometheus as metrics
from vllm.diffusion.api.bodies import (
    check_body,
    check_prompt,
    refuse_fields,
    sent_fields,
)
from vllm.diffusion.api.decisions.calls import DecisionsBody, refuse_openai_body
from vllm.diffusion.api.decisions.serving import DecisionsHandler, make_handler
from vllm.diffusion.api.documentation import offline_docs as documentation
from vllm.diffusion.api.documentation.examples import shown
from vllm.diffusion.api.editing.revisions import RevisionHandler
from vllm.diffusion.api.generate import GenerateHandler
from vllm.diffusion.api.likelihood.loglikelihood import (
    LikelihoodHandler,
    LikelihoodRequest,
    LikelihoodResponse,
)
from vllm.diffusion.api.likelihood.typed_decisions import (
    DecisionRequest,
    register,
    replace_decision_handlers,
)
from vllm.diffusion.api.openai.anthropic import (
    CountTokensBody,
    DiffusionServingMessages,
    MessagesAnswer,
    MessagesBody,
)
from vllm.diffusion.api.openai.openai_protocol import (
    ChatAnswer,
    ChatBatchBody,
    ChatCompletionBody,
    CompletionAnswer,
    CompletionBody,
)
from vllm.diffusion.api.openai.openai_serving import (
    DiffusionServingChat,
    DiffusionServingChatBatch,
    DiffusionServingCompletion,
    replace_handler,
)
from vllm.diffusion.api.openai.responses import (
    DiffusionServingResponses,
    ResponsesBody,
)
from vllm.diffusion.api.page import site as page
from vllm.diffusion.api.page.options import page_options
from vllm.diffusion.api.page.site import Status
from vllm.diffusion.api.protocol import GenerateRequest, GenerateResponse, set_priority
from vllm.diffusion.api.server import (
    adapter_routes,
    editing_routes,
    gate,
    invocations,
    refusals,
    trainer_routes,
    upstream_routes,
)
from vllm.diffusion.api.server.body_checks import ERRORS, checked_by
from vllm.diffusion.api.server.body_reading import BodyReading, max_text_length
from vllm.diffusion.api.server.body_validation import stop_at_first_fault
from vllm.diffusion.api.server.lifecycle import Lifecycle
from vllm.diffusion.api.server.welcome import log_welcome, warn_about_unused_arguments
from vllm.diffusion.api.validator import is_installed, validator_of
from vllm.diffusion.config import served_model, settings_of
from vllm.diffusion.process import watchdog
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensResponse,
)
from vllm.entrypoints.generate.generative_scoring.api_router import create_generative_scoring
from vllm.entrypoints.generate.generative_scoring.serving import (
    GenerativeScoringRequest,
    GenerativeScoringResponse,
)
from vllm.entrypoints.generate.structured_decisions.api_router import create_structured_decision
from vllm.entrypoints.generate.structured_decisions.protocol import StructuredDecisionResponse
from vllm.entrypoints.openai.chat_completion.api_router import (
    create_batch_chat_completion,
    create_chat_completion,
)
from vllm.entrypoints.openai.completion.api_router import create_completion
from vllm.entrypoints.openai.responses.api_router import create_responses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import (
    load_aware_call,
    validate_json_request,
    with_cancellation,
)
from vllm.exceptions import VLLMNotFoundError
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.params import ChatParams
from vllm.version import __version__ as VLLM_VERSION

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.diffusion.api.likelihood.loglikelihood import LikelihoodBody
    from vllm.diffusion.api.protocol import GenerateBody
    from vllm.diffusion.api.validator import Validator
    from vllm.engine.protocol import EngineClient

router = APIRouter()
openai_router = APIRouter()  # replaces upstream's routes of the same paths

_NOT_OURS = "the served model is not a diffusion language model"


# Routers rewrite bodies of /generate to a form of their own; no router rewrites this path.
@router.post(
    "/v1/generate",
    dependencies=checked_by(),
    response_model=None,
    include_in_schema=False,
)
@router.post(
    "/generate",
    dependencies=checked_by(),
    # A cancelled request has no answer to validate.
    response_model=None,
    responses={200: {"model": GenerateResponse, "content": {"text/event-stream": {}}}, **ERRORS},
    openapi_extra=shown("/generate"),
)
@with_cancellation
@load_aware_call
async def generate(request: GenerateRequest, raw_request: Request) -> Response:  # type: ignore[valid-type]
    """Denoise one or more canvases."""
    handler: GenerateHandler | None = raw_request.app.state.diffusion_generate
    if handler is None:
        raise NotImplementedError(_NOT_OURS)
    request_id = raw_request.headers[gate.REQUEST_ID]
    body: GenerateBody = request
    set_priority(body, raw_request.headers)
    if body.stream:
        choices = await handler.choices(body, request_id)
        events = await handler.stream(choices, request_id)
        return StreamingResponse(events, media_type="text/event-stream")
    answer = await handler.answer(body, request_id)
    return Response(answer.encode(), media_type="application/json")


@openai_router.post(
    "/v1/loglikelihood",
    dependencies=checked_by(),
    response_model=None,
    responses={200: {"model": LikelihoodResponse}, **ERRORS},
    openapi_extra=shown("/v1/loglikelihood"),
)
@with_cancellation
@load_aware_call
async def loglikelihood(request: LikelihoodRequest, raw_request: Request) -> Response:  # type: ignore[valid-type]
    """Return how likely the model finds a continuation of a context."""
    body: LikelihoodBody = request
    set_priority(body, raw_request.headers)
    handler: LikelihoodHandler | None = raw_request.app.state.diffusion_likelihood
    if handler is None:
        raise NotImplementedError(_NOT_OURS)
    answer = await handler.answer(body, raw_request.headers[gate.REQUEST_ID])
    return JSONResponse(answer.content())


@openai_router.post(
    "/v1/decisions",
    dependencies=checked_by(),
    response_model=None,
    responses={200: {}, **ERRORS},
    openapi_extra=shown("/v1/decisions"),
)
@with_cancellation
@load_aware_call
async def answer_questions(request: DecisionsBody, raw_request: Request) -> Response:  # type: ignore[valid-type]
    """Answer typed questions in the body of OpenAI or of System One, in one forward pass."""
    set_priority(request, raw_request.headers)
    handler = _decisions_handler(raw_request)
    return JSONResponse(
        await handler.answer(sent_fields(request), raw_request.headers[gate.REQUEST_ID])
    )


@openai_router.get("/v1/decisions/calibration", responses={404: {"model": ErrorResponse}})
async def decision_calibration(raw_request: Request) -> JSONResponse:
    """Return the calibration file of the server."""
    file = _decisions_handler(raw_request).calibration
    if file is None:
        raise VLLMNotFoundError("calibration: this server has none; --additional-config sets it")
    return JSONResponse(dict(file.content))


def _decisions_handler(raw_request: Request) -> DecisionsHandler:
    handler: DecisionsHandler | None = raw_request.app.state.diffusion_decisions
    if handler is None:
        raise NotImplementedError(_NOT_OURS)
    return handler


@openai_router.post(
    "/v1/systemone",
    dependencies=checked_by(refuse_openai_body),
    response_model=None,
    responses={200: {"model": StructuredDecisionResponse}, **ERRORS},
    openapi_extra=shown("/v1/systemone"),
)
async def decisions(request: DecisionRequest, raw_request: Request) -> Any:  # type: ignore[valid-type]
    """Answer typed questions, with one forward pass for all questions of a call."""
    return await create_structured_decision(request, raw_request)


@openai_router.post(
    "/generative_scoring",
    dependencies=checked_by(),
    response_model=None,
    responses={200: {"model": GenerativeScoringResponse}, **ERRORS},
)
async def generative_scoring(request: GenerativeScoringRequest, raw_request: Request) -> Any:
    """Return how likely each of several items is followed by certain tokens."""
    return await create_generative_scoring(request, raw_request)


@openai_router.post(
    "/invocations",
    dependencies=[Depends(validate_json_request)],
    response_model=None,
    responses={200: {"content": {"application/json": {}, "text/event-stream": {}}}, **ERRORS},
)
async def invoke(raw_request: Request) -> Response:
    """SageMaker's route: chat for a body with `messages`, completions for one with `prompt`."""
    return await invocations.forward(raw_request)


@router.get(
    "/ready",
    responses={503: {"description": "draining, paused, unresponsive or dead; `status` says which"}},
)
async def ready(raw_request: Request) -> JSONResponse:
    """Return whether the server would process a new request."""
    lifecycle: Lifecycle | None = raw_request.app.state.diffusion_lifecycle
    if lifecycle is None:  # upstream serves the model
        state = await _state_of(raw_request.app.state.engine_client)
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)
    state = await lifecycle.state()
    content: dict[str, Any] = {"status": state}
    if state == "unresponsive":
        content["engine_silent_s"] = round(lifecycle.silent_s, 1)
    return JSONResponse(content, 200 if state == "ready" else 503)


async def _state_of(engine: EngineClient | None) -> str:
    """Return the state of an engine without `Lifecycle`; a server may have no engine."""
    if engine is None:
        return "ready"
    if engine.errored:
        return "dead"
    return "paused" if await engine.is_paused() else "ready"


@openai_router.get("/version")
async def version() -> JSONResponse:
    """Return the version of upstream, as its own route does, and of this project."""
    return JSONResponse({"version": VLLM_VERSION, "mosaic": __version__})


@openai_router.post(
    "/v1/chat/completions",
    dependencies=checked_by(check_body),
    response_model=None,
    responses={200: {"model": ChatAnswer, "content": {"text/event-stream": {}}}, **ERRORS},
    openapi_extra=shown("/v1/chat/completions"),
)
async def chat(request: ChatCompletionBody, raw_request: Request) -> Any:  # type: ignore[valid-type]
    """Serve OpenAI's chat completions, with diffusion parameters at top level."""
    return await create_chat_completion(request, raw_request)


@openai_router.post(
    "/v1/completions",
    dependencies=checked_by(check_body, lambda body: check_prompt(body.get("prompt"))),
    response_model=None,
    responses={200: {"model": CompletionAnswer, "content": {"text/event-stream": {}}}, **ERRORS},
    openapi_extra=shown("/v1/completions"),
)
async def completions(request: CompletionBody, raw_request: Request) -> Any:  # type: ignore[valid-type]
    """Serve OpenAI's completions, with diffusion parameters at top level."""
    return await create_completion(request, raw_request)


@openai_router.post(
    "/v1/chat/completions/batch",
    dependencies=checked_by(check_body),
    response_model=None,
    responses={200: {"model": ChatAnswer}, **ERRORS},
)
async def chat_batch(request: ChatBatchBody, raw_request: Request) -> Any:  # type: ignore[valid-type]
    """Answer several conversations, each with one answer."""
    return await create_batch_chat_completion(request, raw_request)


@openai_router.post(
    "/v1/responses",
    dependencies=checked_by(refuse_fields),
    response_model=None,
    responses={200: {"content": {"text/event-stream": {}}}, **ERRORS},
)
async def responses(request: ResponsesBody, raw_request: Request) -> Any:  # type: ignore[valid-type]
    """Serve OpenAI's responses, with diffusion parameters at top level."""
    return await create_responses(request, raw_request)


@openai_router.post(
    "/v1/messages",
    dependencies=checked_by(refuse_fields),
    response_model=None,
    responses={200: {"model": MessagesAnswer, "content": {"text/event-stream": {}}}, **ERRORS},
)
@with_cancellation
@load_aware_call
async def messages(request: MessagesBody, raw_request: Request) -> Response:  # type: ignore[valid-type]
    """Serve Anthropic's messages, with diffusion parameters at top level."""
    handler: DiffusionServingMessages = raw_request.app.state.anthropic_serving_messages
    answer = await handler.create_messages(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return refusals.answer(raw_request, answer)
    if isinstance(answer, MessagesAnswer):
        content = answer.model_dump(exclude_none=True)
        return JSONResponse({**content, "diffusion": answer.diffusion.content()})
    return StreamingResponse(answer, media_type="text/event-stream")


@openai_router.post(
    "/v1/messages/count_tokens",
    dependencies=checked_by(refuse_fields),
    response_model=None,
    responses={200: {"model": AnthropicCountTokensResponse}, **ERRORS},
)
async def count_tokens(request: CountTokensBody, raw_request: Request) -> Response:  # type: ignore[valid-type]
    """Return the number of tokens of a conversation."""
    handler: DiffusionServingMessages = raw_request.app.state.anthropic_serving_messages
    answer = await handler.count_tokens(request, raw_request)
    if isinstance(answer, ErrorResponse):
        return refusals.answer(raw_request, answer)
    return JSONResponse(answer.model_dump(exclude_none=True))


class DiffusionEndpoint:
    """Endpoint plugin that upstream's server loads, see its `EndpointPlugin` protocol."""

    name = "dllm_endpoints"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        self._app, self._engine_ready_at = app, time.time()
        app.include_router(router)
        # For other models, upstream's routes stay unchanged.
        if is_installed():
            app.include_router(openai_router)
            editing_routes.attach(app)
            adapter_routes.attach(app)
            trainer_routes.attach(app)
            upstream_routes.attach(app)
            register()

    async def init_state(
        self, engine_client: EngineClient | None, state: Any, args: Namespace
    ) -> None:
        validator = None if engine_client is None else validator_of(engine_client.input_processor)
        if engine_client is None or validator is None:
            state.diffusion_generate = state.diffusion_lifecycle = None
            state.diffusion_likelihood = state.diffusion_decisions = None
            return
        served = served_model(engine_client.vllm_config)
        warn_about_unused_arguments(args, has_prefixes=served.family.is_block_causal)
        # All ranks return the same build info.
        build_info, *_ = await engine_client.collective_rpc("build_info")
        metrics.install(engine_client, build_info)
        state.diffusion_lifecycle = Lifecycle(
            engine_client,
            end=lambda: setattr(state.server, "should_exit", True),
            engines=watchdog.engine_processes(),
        )
        self._limit_requests(engine_client, state.diffusion_lifecycle, args)
        documentation.install(self._app, has_keys=bool(gate.keys_of(args)))
        capacities = await engine_client.collective_rpc("capacity")
        # The rates are the same on all ranks.
        (_, rates), *_ = capacities
        validator.learn_capacity(min(budget_bytes for budget_bytes, _ in capacities), rates)
        _replace_handlers(state, validator)
        await _name_fingerprint(engine_client, state, args)
        model_names = args.served_model_name or [args.model]
        state.diffusion_likelihood = LikelihoodHandler(engine_client, validator, model_names)
        settings = settings_of(engine_client.vllm_config)
        state.diffusion_decisions = make_handler(state, model_names, args.model, settings)
        if settings.page:
            options = page_options(served, model_names[0], __version__)
            page.install(self._app, options, Status(engine_client))
        tokenizer = engine_client.renderer.tokenizer
        scheduling = engine_client.vllm_config.scheduler_config
        log_welcome(
            args,
            served.family.name,
            validator.longest_request(),
            limits=(scheduling.max_num_seqs, scheduling.max_num_batched_tokens),
            own_length=getattr(
                engine_client.model_config.hf_config, "max_position_embeddings", None
            ),
            has_template=bool(args.chat_template or getattr(tokenizer, "chat_template", None)),
            has_page=settings.page,
            engine_ready_at=self._engine_ready_at,
        )
        # From here on the lifecycle watches the engine; this function sends no further calls to
        # it.
        watchdog.is_served.set()
        state.diffusion_generate = GenerateHandler(
            engine_client,
            validator,
            model_names,
            ChatParams(
                chat_template=load_chat_template(args.chat_template),
                chat_template_content_format=args.chat_template_content_format,
                chat_template_kwargs={"add_generation_prompt": True},
            ),
        )

    def _limit_requests(
        self, engine_client: EngineClient, lifecycle: Lifecycle, args: Namespace
    ) -> None:
        """Install the limits of requests and the handlers that answer errors in one line."""
        refusals.install(self._app)
        stop_at_first_fault(self._app)
        # Without httptools, uvicorn parses with h11, which has no hooks.
        if find_spec("httptools") is not None:
            from vllm.diffusion.api.server import connections

            connections.install(args)
        reading = Middleware(BodyReading, max_text_length=max_text_length(engine_client))
        # The gate builds the stack, so this must come first.
        self._app.user_middleware.insert(0, reading)
        gate.install(self._app, lifecycle, args)


async def _name_fingerprint(engine_client: EngineClient, state: Any, args: Namespace) -> None:
    """Make a batch-invariant engine's fingerprint that of OpenAI's responses, unless one is set."""
    promise, *_ = await engine_client.collective_rpc("promise")
    if not promise or args.fingerprint_mode == "custom":
        return
    for name in ("chat", "completion", "chat_batch"):
        handler = getattr(state, f"openai_serving_{name}")
        if handler is not None:
            handler.system_fingerprint = promise["fingerprint"]


def _replace_handlers(state: Any, validator: Validator) -> None:
    """Replace upstream's handlers of our routes with our subclasses."""
    adapter_routes.install(state, validator)
    state.openai_serving_chat = replace_handler(
        state.openai_serving_chat, DiffusionServingChat, validator
    )
    state.diffusion_revisions = RevisionHandler(state.openai_serving_chat, validator)
    state.openai_serving_completion = replace_handler(
        state.openai_serving_completion, DiffusionServingCompletion, validator
    )
    state.openai_serving_responses = replace_handler(
        state.openai_serving_responses, DiffusionServingResponses, validator
    )
    state.openai_serving_chat_batch = replace_handler(
        state.openai_serving_chat_batch, DiffusionServingChatBatch, validator
    )
    state.anthropic_serving_messages = replace_handler(
        state.anthropic_serving_messages, DiffusionServingMessages, validator
    )
    replace_decision_handlers(state, validator)

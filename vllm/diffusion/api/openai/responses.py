# SPDX-License-Identifier: Apache-2.0
"""OpenAI's responses: upstream's handler, with the diffusion parameters and the report.

Input that upstream's parser cannot read is refused, and a stream that fails reports it in an event.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from openai.types.responses import ResponseErrorEvent
from pydantic import ValidationError

from vllm.diffusion.api.bodies import refuse_canvas
from vllm.diffusion.api.choices import primed
from vllm.diffusion.api.conversations import read_items
from vllm.diffusion.api.openai.openai_protocol import extra_args, plain
from vllm.diffusion.api.openai.openai_serving import Diffusion, put_report
from vllm.diffusion.api.schema import with_diffusion_fields
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.guides import spec_of
from vllm.diffusion.request.decision import attach
from vllm.diffusion.request.fields import SPELLINGS
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

logger = init_logger(__name__)

_UPSTREAMS = (SPELLINGS.keys() & ResponsesRequest.model_fields.keys()) - {"seed", "top_p", "top_k"}


def _read_responses(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "input": read_items(body.get("input"))}


ResponsesBody = with_diffusion_fields(
    ResponsesRequest, "ResponsesBody", "Body of POST /v1/responses.", _UPSTREAMS, _read_responses
)


class DiffusionServingResponses(Diffusion, OpenAIServingResponses):
    """Handler of POST /v1/responses."""

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        try:
            if request.tool_choice not in ("auto", "none"):
                wanted = "wanted auto or none here; /v1/chat/completions calls functions"
                raise InvalidParameterError("tool_choice", request.tool_choice, wanted)
            request.vllm_xargs = extra_args(request, self.template_of(request))
            refuse_canvas(request.vllm_xargs.get("stream_canvas"))
            spec = spec_of(plain(request.extract_structured_outputs()))
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        await self.validator.compile(spec)
        answer = await super().create_responses(request, raw_request)
        return await primed(answer) if hasattr(answer, "__aiter__") else answer

    async def _render_resolved_response_inputs(
        self, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        try:
            return await super()._render_resolved_response_inputs(request, *args, **kwargs)
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            wanted = f"{fault['msg']}: {place}"
        except (AssertionError, AttributeError, LookupError, TypeError) as error:
            # Upstream's parser takes parts that are missing, or of another kind, for given.
            logger.debug("input of a response", exc_info=True)
            wanted = f"it cannot be read: {type(error).__name__} {error}".rstrip()
        raise RequestRefused(InvalidParameterError("input", request.input, wanted))

    def _generate_with_builtin_tools(
        self, request_id: str, engine_input: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        decided = self.validator.decide_sampling(sampling_params, engine_input["prompt_token_ids"])
        attach(sampling_params, decided)
        found: AsyncGenerator[Any, None] = super()._generate_with_builtin_tools(
            request_id, engine_input, sampling_params, *args, **kwargs
        )
        return found

    async def responses_full_generator(self, *args: Any, **kwargs: Any) -> Any:
        return _reporting(await super().responses_full_generator(*args, **kwargs))

    async def responses_stream_generator(
        self, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        number = -1
        try:
            async with aclosing(super().responses_stream_generator(*args, **kwargs)) as events:
                async for event in events:
                    number = event.sequence_number
                    if hasattr(event, "response"):
                        _reporting(event.response)
                    yield event
        except Exception as error:
            if number < 0:
                raise
            if not isinstance(error, VLLMError):
                logger.exception("a stream of /v1/responses ended early")
            yield ResponseErrorEvent(
                type="error",
                code="server_error",
                message=str(error) or type(error).__name__,
                sequence_number=number + 1,
            )


def _reporting(response: Any) -> Any:
    """Put the report into an answer, in place of upstream's field."""
    told = getattr(response, "kv_transfer_params", None)
    if told is not None and "dllm" in told:
        put_report(response, {0: told["dllm"]})
    return response

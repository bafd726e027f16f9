# SPDX-License-Identifier: Apache-2.0
"""OpenAI's responses: upstream's handler with the diffusion parameters and the report.

Input that upstream's parser cannot read is refused, and a failing stream ends with an error event.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from openai.types.responses import ResponseErrorEvent
from pydantic import ValidationError

from vllm.diffusion.api.bodies import check_chosen_tool, refuse_canvas
from vllm.diffusion.api.conversations import read_items
from vllm.diffusion.api.openai.openai_protocol import OURS, extra_args, plain
from vllm.diffusion.api.openai.openai_serving import Diffusion, put_report
from vllm.diffusion.api.openai.tool_calls import CallParser, offered
from vllm.diffusion.api.schema import with_diffusion_fields
from vllm.diffusion.api.streams import wait_for_first
from vllm.diffusion.api.tool_prompts import reads_tools
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.guides import SPEC, packed, spec_of, spec_of_tools
from vllm.diffusion.request.decision import IGNORED, attach
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.openai.responses.utils import construct_tool_dicts
from vllm.exceptions import VLLMError
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from vllm.diffusion.guided.tool_grammar import Tools

logger = init_logger(__name__)


def _read_responses(body: dict[str, Any]) -> dict[str, Any]:
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        check_chosen_tool(choice.get("name"), body.get("tools"), "tool_choice.name")
    return {**body, "input": read_items(body.get("input"))}


ResponsesBody = with_diffusion_fields(
    ResponsesRequest, "ResponsesBody", "Body of POST /v1/responses.", _read_responses, OURS
)


# types of tools that upstream converts to functions
_FUNCTION_TYPES = ("function", "custom", "namespace")


class DiffusionServingResponses(Diffusion, OpenAIServingResponses):
    """Handler of POST /v1/responses."""

    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        try:
            request.vllm_xargs = extra_args(request, self.template_of(request))
            refuse_canvas(request.vllm_xargs.get("stream_canvas"))
            spec = spec_of(plain(request.extract_structured_outputs()))
            tools = _requested_tools(request)
            if tools is not None:
                if spec is not None:
                    wanted = "wanted none with a format of the answer"
                    raise InvalidParameterError("tools", list(tools.parameters), wanted)
                spec = spec_of_tools(tools)
                request.vllm_xargs[SPEC] = packed(spec)
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        await self.validator.compile(spec)
        answer = await super().create_responses(request, raw_request)
        return await wait_for_first(answer) if hasattr(answer, "__aiter__") else answer

    def _make_response_parser(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if SPEC in request.vllm_xargs:
            return CallParser()
        return super()._make_response_parser(request, *args, **kwargs)

    async def _render_resolved_response_inputs(
        self, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        given = request.tools
        if request.tool_choice == "none" and not reads_tools(self.template_of(request)):
            request.tools = []
        try:
            return await super()._render_resolved_response_inputs(request, *args, **kwargs)
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(map(str, fault["loc"]))
            wanted = f"{fault['msg']}: {place}"
        except (AssertionError, AttributeError, LookupError, TypeError) as error:
            # Upstream's parser does not check that parts are present and of the expected type.
            logger.debug("input of a response", exc_info=True)
            wanted = f"it cannot be read: {type(error).__name__} {error}".rstrip()
        finally:
            request.tools = given
        raise RequestRefused(InvalidParameterError("input", request.input, wanted))

    def _generate_with_builtin_tools(
        self, request_id: str, engine_input: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        decided = self.validator.decide_sampling(sampling_params, engine_input["prompt_token_ids"])
        attach(sampling_params, decided)
        outputs: AsyncGenerator[Any, None] = super()._generate_with_builtin_tools(
            request_id, engine_input, sampling_params, *args, **kwargs
        )
        return outputs

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


def _requested_tools(request: Any) -> Tools | None:
    """Return the tools that the answer may call; list tools that are not functions as ignored."""
    listed = construct_tool_dicts(request.tools, request.tool_choice) or []
    functions = [(tool["function"]["name"], tool["function"]["parameters"]) for tool in listed]
    others = [
        f"tools[{i}]" for i, tool in enumerate(request.tools) if tool.type not in _FUNCTION_TYPES
    ]
    request.vllm_xargs[IGNORED] += others
    choice = request.tool_choice
    if not functions or choice == "none":
        return None
    if choice in ("auto", "required"):
        return offered(functions, None, may_answer=choice == "auto")
    if getattr(choice, "type", None) not in ("function", "custom"):
        wanted = "wanted auto, none, required, or a function of tools"
        raise InvalidParameterError("tool_choice", plain(choice), wanted)
    return offered(functions, ("tool_choice.name", choice.name))


def _reporting(response: Any) -> Any:
    """Put the report into an answer, replacing upstream's field."""
    params = getattr(response, "kv_transfer_params", None)
    if params is not None and "dllm" in params:
        put_report(response, {0: params["dllm"]})
    return response

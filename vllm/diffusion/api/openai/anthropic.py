# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages: upstream converts them to chat completions, which our handler serves."""

from __future__ import annotations

import json
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from vllm.diffusion.api.bodies import check_chosen_tool, ignored_fields, refuse_canvas, sent_fields
from vllm.diffusion.api.conversations import joined, read_anthropic, read_texts
from vllm.diffusion.api.openai.openai_serving import DiffusionServingChat
from vllm.diffusion.api.report import DiffusionReport
from vllm.diffusion.api.schema import body_class, with_diffusion_fields
from vllm.diffusion.api.tool_prompts import reads_tools
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.decision import IGNORED
from vllm.diffusion.request.fields import SPELLINGS
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_UPSTREAMS = SPELLINGS.keys() & AnthropicMessagesRequest.model_fields.keys()
# types of events that differ from upstream's
_REPORTED = ("message_start", "message_delta", "error")
_STATUS_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    """Return Anthropic's error type for an HTTP status."""
    default = "invalid_request_error" if status < 500 else "api_error"
    return _STATUS_TYPES.get(status, default)


class _Open(AnthropicMessagesRequest):
    model_config = ConfigDict(extra="allow")


def _read_messages(body: dict[str, Any]) -> dict[str, Any]:
    read = {**body, "messages": read_anthropic(body.get("messages"))}
    if "system" in body:
        read["system"] = read_texts(body["system"], "system")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "tool":
        check_chosen_tool(choice.get("name"), body.get("tools"), "tool_choice.name")
    return read


MessagesBody = with_diffusion_fields(
    _Open, "MessagesBody", "Body of POST /v1/messages.", _read_messages
)
CountTokensBody = body_class(
    AnthropicCountTokensRequest,
    "CountTokensBody",
    "Body of POST /v1/messages/count_tokens.",
    _read_messages,
)


class MessagesAnswer(AnthropicMessagesResponse):
    """Answer of POST /v1/messages."""

    diffusion: DiffusionReport


def think(made: Any, thinking: Any, template: str, *, is_bounded: bool) -> list[str]:
    """Set up the thinking of a chat request from the `thinking` field of a message request.

    Args:
        made: upstream's chat request, with the budget and the effort that it derives from
            `thinking`; changed.
        thinking: the client's field; None if it sent none.
        template: the chat template, which may read `enable_thinking`.
        is_bounded: whether the model's thinking can be ended after a number of tokens.

    Returns:
        names of fields without effect.
    """
    if thinking is None or thinking.type == "adaptive":
        return []
    reads = "enable_thinking" in template
    if thinking.type == "disabled":
        # The fallback is None: a template that does not read the switch has nothing to turn off.
        made.reasoning_effort = "none" if reads else None
        return []
    if reads:
        given = made.chat_template_kwargs or {}
        made.chat_template_kwargs = {"enable_thinking": True, **given}
    if is_bounded:
        return []
    made.thinking_token_budget = None
    return ["thinking"]


class DiffusionServingMessages(DiffusionServingChat, AnthropicServingMessages):
    """Handler of POST /v1/messages."""

    def to_chat_completion_request(self, request: Any, **options: Any) -> Any:
        made = super().to_chat_completion_request(request, **options)
        sent = sent_fields(request)
        try:
            ignored = ignored_fields(sent, type(request).model_fields)
            refuse_canvas(sent.get("stream_canvas"))
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        _continue_answer(made, f"messages[{len(request.messages) - 1}].content")
        template, is_bounded = self.template_of(made), self.validator.bounds_thinking
        ignored += think(made, request.thinking, template, is_bounded=is_bounded)
        for name in (sent.keys() & SPELLINGS.keys()) - _UPSTREAMS:
            setattr(made, name, sent[name])
        setattr(made, IGNORED, tuple(ignored))
        # Upstream renders the request unchanged to count its tokens.
        if isinstance(request, AnthropicCountTokensRequest):
            if made.tool_choice == "none" and not reads_tools(template):
                made.tools = None
            made.tool_choice = "none"
        return made

    def messages_full_converter(self, generator: Any) -> MessagesAnswer:
        response = super().messages_full_converter(generator)
        values = {**vars(response), "id": _own_id(response.id)}
        return MessagesAnswer(**values, diffusion=DiffusionReport(**generator.diffusion))

    async def message_stream_converter(
        self, generator: AsyncGenerator[Any, None]
    ) -> AsyncGenerator[str, None]:
        report: dict[str, Any] = {}
        status = HTTPStatus.INTERNAL_SERVER_ERROR

        async def tapped() -> AsyncGenerator[Any, None]:
            nonlocal status
            async with aclosing(generator):
                async for chunk in generator:
                    if isinstance(chunk, ErrorResponse):
                        status = HTTPStatus(chunk.error.code)
                        # For this error the log has no stack trace.
                        raise GracefulHTTPError(chunk.error.message, status)
                    report.update(getattr(chunk, "diffusion", {}))
                    yield chunk

        async with aclosing(super().message_stream_converter(tapped())) as events:
            async for text in events:
                yield _changed(text, report, status)


def _continue_answer(made: Any, field: str) -> None:
    """Make the answer continue the conversation's last message if it is the assistant's."""
    last = made.messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return
    text = joined(last.get("content"))
    if not text.strip():
        refusal = InvalidParameterError(field, text, "wanted text that the answer continues")
        raise RequestRefused(refusal)
    made.continue_final_message, made.add_generation_prompt = True, False


def _own_id(chat_id: str) -> str:
    return f"msg_{chat_id.removeprefix('chatcmpl-')}"


def _changed(text: str, report: dict[str, Any], status: int) -> str:
    """Return an event of a stream with Anthropic's ids and error types and the diffusion report.

    Args:
        report: the diffusion report, which the last event contains.
        status: HTTP status of a failure, which determines its type.
    """
    name, _, data = text.partition("\ndata: ")
    kind = name.removeprefix("event: ")
    if kind not in _REPORTED:
        return text
    content = json.loads(data)
    if kind == "message_start":
        content["message"]["id"] = _own_id(content["message"]["id"])
    elif kind == "message_delta":
        content["diffusion"] = report
    else:
        content["error"]["type"] = error_type(status)
    return f"{name}\ndata: {json.dumps(content)}\n\n"

# SPDX-License-Identifier: Apache-2.0
"""Anthropic's messages, which upstream converts to chat completions, served by our handler."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict

from vllm.diffusion.api.bodies import left_out, refuse_canvas
from vllm.diffusion.api.openai.openai_serving import DiffusionServingChat
from vllm.diffusion.api.report import DiffusionReport
from vllm.diffusion.api.schema import with_diffusion_fields
from vllm.diffusion.api.validator import RequestRefused
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.decision import IGNORED
from vllm.diffusion.request.fields import SPELLINGS
from vllm.entrypoints.anthropic.protocol import (
    AnthropicMessagesRequest,
    AnthropicMessagesResponse,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_UPSTREAMS = SPELLINGS.keys() & AnthropicMessagesRequest.model_fields.keys()
_DELTA = "event: message_delta\n"


class _Open(AnthropicMessagesRequest):
    model_config = ConfigDict(extra="allow")


MessagesBody = with_diffusion_fields(
    _Open, "MessagesBody", "Body of POST /v1/messages.", _UPSTREAMS
)


class MessagesAnswer(AnthropicMessagesResponse):
    """Answer of POST /v1/messages."""

    diffusion: DiffusionReport


def think(made: Any, thinking: Any, template: str, *, is_bounded: bool) -> list[str]:
    """Let a chat request think as its `thinking` says, as far as the model can.

    Args:
        made: upstream's chat request, with the budget and the effort that it reads of `thinking`.
        thinking: the client's field; None if it sent none.
        template: the chat template, which may read `enable_thinking`.
        is_bounded: the model's thinking can be ended after a number of tokens.

    Returns:
        names of fields that do not act.
    """
    if thinking is None or thinking.type == "adaptive":
        return []
    reads = "enable_thinking" in template
    if thinking.type == "disabled":
        made.reasoning_effort = "none" if reads else None  # nothing is to be turned off
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
        sent = {name: getattr(request, name) for name in request.model_fields_set}
        try:
            ignored = left_out(sent, type(request).model_fields)
            refuse_canvas(sent.get("stream_canvas"))
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        template, is_bounded = self.template_of(made), self.validator.bounds_thinking
        ignored += think(made, request.thinking, template, is_bounded=is_bounded)
        for name in (sent.keys() & SPELLINGS.keys()) - _UPSTREAMS:
            setattr(made, name, sent[name])
        setattr(made, IGNORED, tuple(ignored))
        return made

    def messages_full_converter(self, generator: Any) -> MessagesAnswer:
        found = super().messages_full_converter(generator)
        return MessagesAnswer(**vars(found), diffusion=DiffusionReport(**generator.diffusion))

    async def message_stream_converter(
        self, generator: AsyncGenerator[str, None]
    ) -> AsyncGenerator[str, None]:
        report: dict[str, Any] = {}

        async def heard() -> AsyncGenerator[str, None]:
            async with aclosing(generator):
                async for text in generator:
                    if '"diffusion": ' in text:
                        report.update(json.loads(text.removeprefix("data: ")).get("diffusion", {}))
                    yield text

        async with aclosing(super().message_stream_converter(heard())) as events:
            async for text in events:
                if text.startswith(_DELTA):
                    content = json.loads(text.removeprefix(f"{_DELTA}data: "))
                    yield f"{_DELTA}data: {json.dumps({**content, 'diffusion': report})}\n\n"
                else:
                    yield text

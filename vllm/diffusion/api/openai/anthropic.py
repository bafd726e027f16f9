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


class DiffusionServingMessages(DiffusionServingChat, AnthropicServingMessages):
    """Handler of POST /v1/messages."""

    @classmethod
    def to_chat_completion_request(cls, request: Any, **options: Any) -> Any:
        made = super().to_chat_completion_request(request, **options)
        sent = {name: getattr(request, name) for name in request.model_fields_set}
        try:
            ignored = left_out(sent, type(request).model_fields)
            refuse_canvas(sent.get("stream_canvas"))
        except InvalidParameterError as error:
            raise RequestRefused(error) from None
        for name in (sent.keys() & SPELLINGS.keys()) - _UPSTREAMS:
            setattr(made, name, sent[name])
        if made.thinking_token_budget is not None:  # of `thinking`, which no model here does
            made.thinking_token_budget = None
            ignored.append("thinking")
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

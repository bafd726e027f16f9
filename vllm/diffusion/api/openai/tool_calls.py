# SPDX-License-Identifier: Apache-2.0
"""OpenAI's tools: a grammar restricts answers, so every call is one of the offered tools.

A call has the same form for every model:

    <tool_call>
    {"name": "NAME", "arguments": {...}}
    </tool_call>

With `tool_choice: auto` an answer is either a call or a text that does not begin with "<".
"""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.tool_grammar import CALL_END, CALL_START, Tools
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

_CALL = re.compile(
    re.escape(CALL_START) + r'"([\w-]+)", "arguments": (.*)' + re.escape(CALL_END), re.DOTALL
)
_HEAD = re.compile(re.escape(CALL_START) + r'"([\w-]+)", "arguments": ')
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def requested_tools(request: Any) -> Tools | None:
    """Return the tools that the answer to a body may call, or None if it may call none.

    Raises:
        InvalidParameterError: two tools have one name, a name is invalid, or the chosen tool is
            not among the tools.
    """
    choice = "auto" if request.tool_choice is None else request.tool_choice
    if not request.tools or choice == "none":
        return None
    functions = [(tool.function.name, tool.function.parameters) for tool in request.tools]
    if isinstance(choice, str):
        return offered(functions, None, may_answer=choice == "auto")
    return offered(functions, ("tool_choice.function.name", choice.function.name))


def offered(
    functions: Sequence[tuple[str, Any]],
    chosen: tuple[str, str] | None,
    *,
    may_answer: bool = False,
) -> Tools:
    """Return the tools that an answer may call.

    Args:
        functions: name and parameter schema of each function.
        chosen: the field that names the only allowed function, and its name; None allows all.
        may_answer: whether the answer may be text instead.
    """
    names: dict[str, Any] = {}
    for name, parameters in functions:
        if not _NAME.fullmatch(name) or name in names:
            raise InvalidParameterError(
                "tools", name, "wanted different names of 1 to 64 letters, digits, _ and -"
            )
        names[name] = parameters or {"type": "object", "properties": {}}
    if chosen is None:
        return Tools(names, may_answer=may_answer)
    field, name = chosen
    if name not in names:
        raise InvalidParameterError(field, name, f"wanted one of: {', '.join(names)}")
    return Tools({name: names[name]}, may_answer=may_answer)


def put_calls(response: Any) -> None:
    """Convert answers that are calls to tool calls."""
    for choice in response.choices:
        match = _CALL.fullmatch((choice.message.content or "").strip())
        if match is not None:
            function = FunctionCall(name=match[1], arguments=match[2])
            choice.message.tool_calls = [ToolCall(id=_new_id(), function=function)]
            choice.message.content = None
            choice.finish_reason = "tool_calls"


async def with_calls(chunks: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Yield the chunks of a stream with calls converted to deltas of tool calls."""
    writers: dict[int, _CallWriter] = {}
    async with aclosing(chunks):
        async for chunk in chunks:
            for choice in getattr(chunk, "choices", ()):  # an error has no choices
                writer = writers.setdefault(choice.index, _CallWriter())
                writer.rewrite(choice.delta)
                if writer.is_call and choice.finish_reason == "stop":
                    choice.finish_reason = "tool_calls"
            yield chunk


class _CallWriter:
    """Converts the text deltas of one streamed answer to deltas of a tool call."""

    def __init__(self) -> None:
        self._text = ""
        self._num_sent = -1  # characters of the arguments; -1 before the name is sent

    @property
    def is_call(self) -> bool:
        """Whether the answer is a call."""
        return self._text.startswith("<")

    def rewrite(self, delta: DeltaMessage) -> None:
        """Replace the text of a call by its delta."""
        self._text += delta.content or ""
        if not self.is_call:
            return
        if delta.content:
            delta.content = None
        head = _HEAD.match(self._text)
        if head is not None:
            calls = self._deltas(head)
            if calls:
                delta.tool_calls = calls

    def _deltas(self, head: re.Match[str]) -> list[DeltaToolCall]:
        arguments = self._text[head.end() :]
        known = arguments.rstrip()
        known = known.removesuffix(CALL_END) if known.endswith(CALL_END) else arguments
        # The text may end with a part of the end tag.
        if known is arguments:
            known = arguments[: max(len(arguments) - len(CALL_END) - 1, 0)]
        is_first, start = self._num_sent < 0, max(self._num_sent, 0)
        self._num_sent = max(len(known), start)
        if is_first:
            function = DeltaFunctionCall(name=head[1], arguments=known)
            return [DeltaToolCall(id=_new_id(), type="function", index=0, function=function)]
        if len(known) <= start:
            return []
        return [DeltaToolCall(index=0, function=DeltaFunctionCall(arguments=known[start:]))]


class CallParser:
    """Parser of an answer of `/v1/responses` with the methods of upstream's parser that are used.

    Attributes:
        reasoning_parser: always None, because a call is the whole answer.
    """

    reasoning_parser = None

    def __init__(self) -> None:
        self._writer = _CallWriter()

    def set_prompt_token_ids(self, token_ids: Sequence[int]) -> None:
        """Ignore the prompt: a call does not depend on it."""

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        return 0

    def parse(
        self, text: str, *_: Any, **__: Any
    ) -> tuple[None, str | None, list[FunctionCall] | None]:
        """Return the reasoning, content and calls of a whole answer."""
        match = _CALL.fullmatch(text.strip())
        if match is None:
            return None, text, None
        return None, None, [FunctionCall(id=_new_id(), name=match[1], arguments=match[2])]

    def parse_delta(self, *, delta_text: str, **_: Any) -> DeltaMessage:
        """Return the new part of a growing answer: text, or a part of a call."""
        delta = DeltaMessage(content=delta_text)
        self._writer.rewrite(delta)
        return delta


def _new_id() -> str:
    return f"call_{uuid4().hex}"

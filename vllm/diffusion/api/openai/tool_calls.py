# SPDX-License-Identifier: Apache-2.0
"""OpenAI's tools: answers are restricted to a language, so every call is one that was offered.

A call is written in one form, whatever the model:

    <tool_call>
    {"name": "NAME", "arguments": {...}}
    </tool_call>

With `tool_choice: auto` an answer is a call, or any text that does not begin with "<".
"""

from __future__ import annotations

import json
import re
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm.diffusion.api.events import DONE, event
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.tool_grammar import CALL_END, CALL_START, Tools
from vllm.entrypoints.generate.base.protocol import FunctionCall, ToolCall

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

_CALL = re.compile(
    re.escape(CALL_START) + r'"([\w-]+)", "arguments": (.*)' + re.escape(CALL_END), re.DOTALL
)
_HEAD = re.compile(re.escape(CALL_START) + r'"([\w-]+)", "arguments": ')
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def asked_tools(request: Any) -> Tools | None:
    """Return the tools that the answer of a body may call; None if it may call none.

    Raises:
        InvalidParameterError: two tools have one name, or a name that no call can have.
    """
    choice = "auto" if request.tool_choice is None else request.tool_choice
    if not request.tools or choice == "none":
        return None
    functions = [tool.function for tool in request.tools]
    names = [function.name for function in functions]
    seen: set[str] = set()
    for name in names:
        if not _NAME.fullmatch(name) or name in seen:
            raise InvalidParameterError(
                "tools", name, "wanted different names of 1 to 64 letters, digits, _ and -"
            )
        seen.add(name)
    named = None if isinstance(choice, str) else choice.function.name
    if named is not None and named not in names:
        wanted = f"wanted one of: {', '.join(names)}"
        raise InvalidParameterError("tool_choice.function.name", named, wanted)
    offered = [f for f in functions if named in (None, f.name)]
    parameters = {f.name: f.parameters or {"type": "object", "properties": {}} for f in offered}
    return Tools(parameters, may_answer=choice == "auto")


def put_calls(response: Any) -> None:
    """Convert the answers that are calls to tool calls."""
    for choice in response.choices:
        found = _CALL.fullmatch((choice.message.content or "").strip())
        if found is not None:
            function = FunctionCall(name=found[1], arguments=found[2])
            choice.message.tool_calls = [ToolCall(id=_new_id(), function=function)]
            choice.message.content = None
            choice.finish_reason = "tool_calls"


async def with_calls(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Yield a stream's events, with calls as deltas of tool calls."""
    writers: dict[int, _CallWriter] = {}
    async with aclosing(chunks):
        async for text in chunks:
            if text == DONE:
                yield text
                continue
            content = json.loads(text.removeprefix("data: "))
            for choice in content.get("choices", []):
                writers.setdefault(choice["index"], _CallWriter()).rewrite(choice)
            yield event(json.dumps(content))


class _CallWriter:
    """State of one streamed answer: whether it is a call, and how much of it has been sent."""

    def __init__(self) -> None:
        self._text = ""
        self._told = -1  # characters of the arguments; -1 before the name

    def rewrite(self, choice: dict[str, Any]) -> None:
        """Replace the text of a call by its delta."""
        delta = choice["delta"]
        self._text += delta.get("content") or ""
        if not self._text.startswith("<"):
            return
        if delta.get("content"):
            delta["content"] = None
        head = _HEAD.match(self._text)
        if head is not None:
            calls = self._deltas(head)
            if calls:
                delta["tool_calls"] = calls
        if choice.get("finish_reason") == "stop":
            choice["finish_reason"] = "tool_calls"

    def _deltas(self, head: re.Match[str]) -> list[dict[str, Any]]:
        found: dict[str, Any] = {}
        arguments = self._text[head.end() :]
        known = arguments.rstrip()
        known = known.removesuffix(CALL_END) if known.endswith(CALL_END) else arguments
        if known is arguments:  # the end may have begun
            known = arguments[: max(len(arguments) - len(CALL_END) - 1, 0)]
        if self._told < 0:
            found = {"id": _new_id(), "type": "function", "function": {"name": head[1]}}
            self._told = 0
        new, self._told = known[self._told :], max(len(known), self._told)
        if not new and not found:
            return []
        function = {**found.get("function", {}), "arguments": new}
        return [{**found, "index": 0, "function": function}]


def _new_id() -> str:
    return f"call_{uuid4().hex}"

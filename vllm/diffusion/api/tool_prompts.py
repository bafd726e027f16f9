# SPDX-License-Identifier: Apache-2.0
"""Tools in the prompt: text for tools, calls and results that a chat template does not render.

The text of a call is the same as in answers, see `vllm.diffusion.guided.tool_grammar`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.conversations import joined
from vllm.diffusion.guided.tool_grammar import CALL_END, CALL_START

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_INSTRUCTIONS = """You may call one of these functions:
{tools}
To call one, answer with nothing but:
<tool_call>
{{"name": "NAME", "arguments": ARGUMENTS}}
</tool_call>"""


def reads_tools(template: str) -> bool:
    """Return whether a chat template lists the tools of a request by itself."""
    return "tools" in template


def with_tools(
    messages: Sequence[Any], tools: Sequence[Mapping[str, Any]] | None, template: str
) -> tuple[list[Any], Sequence[Mapping[str, Any]] | None]:
    """Add tools, calls and results to messages as text if the template does not render them.

    Returns:
        the messages, and the tools that the template lists by itself.
    """
    turns = list(messages)
    if "tool_calls" not in template:
        turns = [_as_text(message) for message in turns]
    if not tools or reads_tools(template):
        return turns, tools
    listed = "\n".join(json.dumps(_described(tool["function"])) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools=listed)
    if turns and turns[0]["role"] == "system":
        content = f"{joined(turns[0].get('content'))}\n\n{instructions}"
        return [{**turns[0], "content": content}, *turns[1:]], None
    return [{"role": "system", "content": instructions}, *turns], None


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in function.items() if value is not None}


def _as_text(message: Any) -> Any:
    if message["role"] == "tool":
        result = f"<tool_response>\n{joined(message.get('content'))}\n</tool_response>"
        return {"role": "user", "content": result}
    if message["role"] != "assistant" or not message.get("tool_calls"):
        return message
    written = [_written(call["function"]) for call in message["tool_calls"]]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    text = joined(message.get("content"))
    return {**others, "content": "\n".join([*filter(None, [text]), *written])}


def _written(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'{CALL_START}{json.dumps(function["name"])}, "arguments": {arguments}{CALL_END}'

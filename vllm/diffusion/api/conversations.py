# SPDX-License-Identifier: Apache-2.0
"""Conversion of conversations as clients send them to the form of upstream's models and templates.

Clients send texts in the parts of several APIs. Here all of them become parts of type `text`, and
a single part becomes a string. An invalid part is refused with `InvalidParameterError` and its
path, before upstream's models parse it: their errors list every alternative of a union, and some
come too late to name the path.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.core.surrogates import refuse_lone_surrogates

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Types of parts that hold a text, in chat completions and in responses, and the key of the text.
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
OF_CHAT = frozenset({"thinking", "tool_reference"})
OF_MESSAGES = frozenset(
    {
        *("thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference"),
        *("tool_addition", "tool_removal"),
    }
)


def read_chat(messages: Any, field: str = "messages") -> list[dict[str, Any]]:
    """Return the messages of a chat completion, with texts and tool calls in upstream's form."""
    return [
        {**_read_calls(message, place), "content": _as_content(message["content"])}
        for place, message in _read(messages, field, OF_CHAT)
    ]


def read_anthropic(messages: Any, field: str = "messages") -> list[dict[str, Any]]:
    """Return Anthropic's messages; texts, also in tool results, become blocks of type `text`."""
    turns = []
    for place, message in _read(messages, field, OF_MESSAGES):
        content = message["content"]
        if isinstance(content, list):
            content = [_read_result(block, place, i) for i, block in enumerate(content)]
        turns.append({**message, "content": content})
    return turns


def read_texts(content: Any, field: str) -> Any:
    """Return a content that holds only texts: a string, or a list of parts of type `text`."""
    return _read_content(content, field, frozenset())


def joined(content: Any) -> str:
    """Return the parts of a content joined by newlines, as upstream joins them."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part if isinstance(part, str) else part.get("text", "") for part in content)


def _read(messages: Any, field: str, others: Collection[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the path of each message, and the message with its parts converted."""
    if not isinstance(messages, list) or not messages:
        raise InvalidParameterError(field, messages, "wanted a list of messages, at least one")
    checked = []
    for index, message in enumerate(messages):
        place = f"{field}[{index}]"
        if not isinstance(message, dict):
            raise InvalidParameterError(place, message, "wanted an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidParameterError(f"{place}.role", role, f"wanted one of: {', '.join(ROLES)}")
        if content is not None or role != "assistant":
            content = _read_content(content, f"{place}.content", others)
        checked.append((place, {**message, "content": content}))
    return checked


def _read_content(content: Any, field: str, others: Collection[str]) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameterError(field, content, "wanted a string or a list of parts")
    return [_read_part(part, f"{field}[{i}]", others) for i, part in enumerate(content)]


def _read_part(part: Any, field: str, others: Collection[str]) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidParameterError(field, part, "wanted an object with a type, or a string")
    kind = part["type"]
    if kind in others:
        return part
    if kind not in _TEXT_KEYS:
        wanted = f"wanted text: one of {', '.join([*_TEXT_KEYS, *sorted(others)])}"
        raise InvalidParameterError(f"{field}.type", kind, wanted)
    key = _TEXT_KEYS[kind]
    if not isinstance(part.get(key), str):
        raise InvalidParameterError(f"{field}.{key}", part.get(key), "wanted a string")
    if kind == "text":
        return part
    return {"type": "text", "text": part[key]}


def _as_content(content: Any) -> Any:
    """Return a single text as a string; several parts stay, because the template joins them."""
    if isinstance(content, list) and not content:
        return ""
    if isinstance(content, list) and len(content) == 1 and content[0]["type"] == "text":
        return content[0]["text"]
    return content


def _read_calls(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a message with its tool calls checked; a null list counts as no calls.

    The older form (`function_call` and the role `function`) is converted to tool calls.
    """
    read = dict(message)
    calls, older = read.pop("tool_calls", None), read.pop("function_call", None)
    if read["role"] == "function":
        _check_text(read, "name", field)
        read |= {"role": "tool", "tool_call_id": read["name"]}
    if calls is not None:
        return {**read, "tool_calls": _checked_calls(calls, f"{field}.tool_calls")}
    if older is None:
        return read
    _check_function(older, f"{field}.function_call")
    call = {"id": older["name"], "type": "function", "function": older}
    return {**read, "tool_calls": [call]}


def _checked_calls(calls: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidParameterError(field, calls, "wanted a list of calls")
    for index, call in enumerate(calls):
        place = f"{field}[{index}]"
        if not isinstance(call, dict):
            raise InvalidParameterError(place, call, "wanted an object with id and function")
        if call.get("type", "function") != "function":
            raise InvalidParameterError(f"{place}.type", call["type"], "wanted function")
        _check_text(call, "id", place)
        _check_function(call.get("function"), f"{place}.function")
    return [{**call, "type": "function"} for call in calls]


def _check_function(function: Any, field: str) -> None:
    if not isinstance(function, dict):
        raise InvalidParameterError(field, function, "wanted an object with name and arguments")
    check_call(function, field)


def check_call(function: Mapping[str, Any], field: str) -> None:
    """Refuse a call without a name, or with arguments that are not a string."""
    _check_text(function, "name", field)
    _check_text(function, "arguments", field, "wanted a string of JSON")
    place, arguments = f"{field}.arguments", function["arguments"]
    # Upstream parses the arguments too if they are valid JSON.
    try:
        value = json.loads(arguments)
    except json.JSONDecodeError:
        return
    except (RecursionError, ValueError):
        wanted = "wanted JSON of a few hundred levels, with numbers of 64 bits"
        raise InvalidParameterError(place, arguments, wanted) from None
    refuse_lone_surrogates(value, place)


def _check_text(
    owner: Mapping[str, Any], name: str, field: str, wanted: str = "wanted a string"
) -> None:
    if not isinstance(owner.get(name), str):
        raise InvalidParameterError(f"{field}.{name}", owner.get(name), wanted)


def _read_result(block: dict[str, Any], place: str, index: int) -> dict[str, Any]:
    """Return a tool result whose text parts are joined to one text."""
    if block["type"] != "tool_result" or not isinstance(block.get("content"), list):
        return block
    field = f"{place}.content[{index}].content"
    parts = _read_content(block["content"], field, frozenset({"tool_reference"}))
    if all(part["type"] == "text" for part in parts):
        return {**block, "content": joined(parts)}
    return {**block, "content": parts}


def read_items(items: Any, field: str = "input") -> Any:
    """Return the input of `/v1/responses`: a string, or items with texts in upstream's form."""
    if isinstance(items, str):
        return items
    if not isinstance(items, list) or not items:
        raise InvalidParameterError(field, items, "wanted a string or a list of items")
    return [_read_item(item, f"{field}[{index}]") for index, item in enumerate(items)]


def _read_item(item: Any, field: str) -> Any:
    if not isinstance(item, dict):
        raise InvalidParameterError(field, item, "wanted an object")
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise InvalidParameterError(f"{field}.type", kind, "wanted a string")
    read = _ITEMS.get(kind)
    return item if read is None else read(item, field)


def _read_message_item(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameterError(f"{field}.role", role, f"wanted one of: {', '.join(ROLES)}")
    content = read_texts(item.get("content"), f"{field}.content")
    if isinstance(content, list):
        # Upstream reads only the first part of an assistant's message.
        if role == "assistant":
            part = {"type": "output_text", "text": joined(content), "annotations": []}
            content = [part]
        elif len(content) > 1:
            content = [{"type": "input_text", "text": part["text"]} for part in content]
        else:
            content = joined(content)
    return {**item, "type": "message", "content": content}


def _read_call_item(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    _check_text(item, "call_id", field)
    check_call(item, field)
    return dict(item)


def _read_output_item(item: Mapping[str, Any], field: str) -> dict[str, Any]:
    _check_text(item, "call_id", field)
    return {**item, "output": joined(read_texts(item.get("output"), f"{field}.output"))}


_ITEMS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "message": _read_message_item,
    "function_call": _read_call_item,
    "function_call_output": _read_output_item,
}

# SPDX-License-Identifier: Apache-2.0
"""The `input` of OpenAI's decisions as text: strings, messages, calls of functions and outputs.

User messages alone become their text: messages are joined by blank lines, and parts by line ends.
With any other item, the model reads the whole list as compact JSON.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm.diffusion.api.decisions.faults import (
    BodyFault,
    check_list,
    check_object,
    check_one_of,
    check_text,
    key_of,
    wanted,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_ITEMS = 131_072
MAX_PARTS = 16_384
MAX_TEXT = 10 * 1024 * 1024  # characters of a text
MAX_JSON_LEVELS = 32
MAX_JSON_VALUES = 10_000
MAX_JSON_BYTES = 256 * 1024

_TEXT, _IMAGE, _JSON = "input_text", "input_image", "input_json"
_OUTPUT_TEXT, _REFUSAL = "output_text", "refusal"
_USER_PARTS = (_TEXT, _JSON)
_TEXT_PARTS = (_TEXT,)
_ASSISTANT_PARTS = (_OUTPUT_TEXT, _REFUSAL)
_PARTS_OF = {
    "user": _USER_PARTS,
    "developer": _TEXT_PARTS,
    "system": _TEXT_PARTS,
    "assistant": _ASSISTANT_PARTS,
}
_STATUS = ("in_progress", "completed", "incomplete")
_PHASES = ("commentary", "final_answer")
# By type of an item, the required and the optional fields.
_ITEMS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "function_call": (("call_id", "name", "arguments"), ("id", "namespace", "status")),
    "custom_tool_call": (("call_id", "name", "input"), ("id", "namespace", "status")),
    "function_call_output": (("call_id", "output"), ("id", "status")),
    "custom_tool_call_output": (("call_id", "output"), ("id", "status")),
}


def text_of_input(path: str, value: Any) -> str:
    """Return the text that the model reads for an `input`.

    Raises:
        BodyFault: naming the part that is invalid.
    """
    if isinstance(value, str):
        return _text(path, value)
    if not isinstance(value, list):
        raise wanted(path, value, "a string or a list of messages, calls and outputs")
    items = check_list(path, value, 0, MAX_ITEMS)
    read = [_item(f"{path}[{number}]", item) for number, item in enumerate(items)]
    _check_calls(path, read)
    if all(item.get("role") == "user" for item in read):
        return "\n\n".join(_text_of_content(item["content"]) for item in read)
    return compact(read)


def text_of_parts(path: str, value: Any) -> str:
    """Return the text of a string, or of a list of parts of a user's message."""
    return _text_of_content(_content(path, value, _USER_PARTS))


def compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _item(path: str, item: Any) -> dict[str, Any]:
    """Return an item with the fields that the model reads, in the order of the reference."""
    if not isinstance(item, dict):
        raise wanted(path, item, "a message, a call or an output")
    kind = item.get("type", "message")
    check_one_of(f"{path}.type", kind, ("message", *_ITEMS))
    if kind == "message":
        return _message(path, item)
    required, optional = _ITEMS[kind]
    check_object(path, item, (*required, "type"), optional)
    result = {"type": kind}
    for name in required:
        if name == "output":
            result[name] = _content(f"{path}.{name}", item[name], _TEXT_PARTS)
        else:
            result[name] = _text(f"{path}.{name}", item[name])
    for name in optional:
        if item.get(name) is not None:
            result[name] = _optional(path, name, item[name])
    return result


def _optional(path: str, name: str, value: Any) -> str:
    if name == "status":
        return check_one_of(f"{path}.{name}", value, _STATUS)
    return check_text(f"{path}.{name}", value, "a string or nothing")


def _message(path: str, item: Mapping[str, Any]) -> dict[str, Any]:
    role = check_one_of(f"{path}.role", item.get("role"), tuple(_PARTS_OF))
    optional = ("type", "phase") if role == "assistant" else ("type",)
    check_object(path, item, ("role", "content"), optional)
    content = _content(f"{path}.content", item["content"], _PARTS_OF[role])
    result = {"role": role, "content": content}
    if "type" in item:
        result["type"] = item["type"]
    if item.get("phase") is not None:
        result["phase"] = check_one_of(f"{path}.phase", item["phase"], _PHASES)
    return result


def _content(path: str, value: Any, accepted: Collection[str]) -> Any:
    """Return a string, or a list of parts without cache breakpoints."""
    if isinstance(value, str):
        return _text(path, value)
    if not isinstance(value, list):
        raise wanted(path, value, "a string or a list of parts")
    parts = check_list(path, value, 0, MAX_PARTS)
    return [_part(f"{path}[{number}]", part, accepted) for number, part in enumerate(parts)]


def _part(path: str, part: Any, accepted: Collection[str]) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise wanted(path, part, f"a part: {' or '.join(accepted)}")
    kind = part.get("type")
    if kind == _IMAGE:
        raise BodyFault(path, "input_image; wanted text")
    check_one_of(f"{path}.type", kind, accepted)
    field = {_JSON: "data", _REFUSAL: "refusal"}.get(str(kind), "text")
    breakpoint_ = () if kind in _ASSISTANT_PARTS else ("prompt_cache_breakpoint",)
    check_object(path, part, ("type", field), breakpoint_)
    if part.get("prompt_cache_breakpoint") is not None:
        at = f"{path}.prompt_cache_breakpoint"
        mark = check_object(at, part["prompt_cache_breakpoint"], ("mode",), ())
        check_one_of(f"{at}.mode", mark["mode"], ("explicit",))
    if kind == _JSON:
        _check_json(f"{path}.data", part["data"])
        return {"type": kind, "data": part["data"]}
    return {"type": kind, field: _text(f"{path}.{field}", part[field])}


def _text(path: str, value: Any) -> str:
    text = check_text(path, value)
    if len(text) > MAX_TEXT:
        raise BodyFault(path, f"given {len(text)} characters; wanted at most {MAX_TEXT:,}")
    return text


def _check_json(path: str, data: Any) -> None:
    """Check the limits of JSON in a part: levels of containers, values and bytes."""
    is_object_list = isinstance(data, list) and all(isinstance(item, dict) for item in data)
    if not isinstance(data, dict) and not is_object_list:
        raise wanted(path, data, "an object or a list of objects")
    levels, num_values, pending = 0, 0, [data]
    while pending:
        levels += 1
        if levels > MAX_JSON_LEVELS:
            raise BodyFault(path, f"given {levels} levels or more; wanted at most {levels - 1}")
        below: list[Any] = []
        for container in pending:
            below += container.values() if isinstance(container, dict) else container
        num_values += len(below)
        if num_values > MAX_JSON_VALUES:
            limit = f"wanted at most {MAX_JSON_VALUES:,}"
            raise BodyFault(path, f"given {num_values} values or more; {limit}")
        pending = [value for value in below if isinstance(value, dict | list)]
    num_bytes = len(compact(data).encode())
    if num_bytes > MAX_JSON_BYTES:
        raise BodyFault(path, f"given {num_bytes} bytes; wanted at most {MAX_JSON_BYTES:,}")


def _text_of_content(content: Any) -> str:
    """Return the text of a user's content; parts are joined by line ends."""
    if isinstance(content, str):
        return content
    return "\n".join(
        compact(part["data"]) if part["type"] == _JSON else part["text"] for part in content
    )


def _check_calls(path: str, items: list[dict[str, Any]]) -> None:
    """Check that every output belongs to a call."""
    calls = {(item["type"], item["call_id"]) for item in items if "call_id" in item}
    for item in items:
        if "output" in item:
            call_id, kind = item["call_id"], item["type"].removesuffix("_output")
            if (kind, call_id) not in calls:
                raise BodyFault(path, f"call_id {key_of(call_id)} has an output and no call")

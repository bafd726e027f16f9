# SPDX-License-Identifier: Apache-2.0
"""Expression of answers that are calls of functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.diffusion.guided.json_schema import from_schema
from vllm.diffusion.guided.regex import ANY
from vllm.diffusion.guided.schema_keywords import ANNOTATIONS, TYPES
from vllm.diffusion.guided.syntax import Repeat, chars, complement, either, maybe, then

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.guided.allowance import Allowance
    from vllm.diffusion.guided.syntax import Node

CALL_START = '<tool_call>\n{"name": '
CALL_END = "}\n</tool_call>"
_WITHOUT_MEMBERS: dict[str, Any] = {"type": "object", "additionalProperties": False}


class Tools(NamedTuple):
    """Functions that an answer may call.

    Attributes:
        parameters: by name of a function, the schema of its arguments.
        may_answer: whether the answer may be text instead.
    """

    parameters: Mapping[str, Any]
    may_answer: bool


def calls(tools: Tools, allowance: Allowance | None = None) -> Node:
    """Return the expression of one call of any of the functions.

    If text is allowed, it must not look like a call. A function whose schema names no arguments is
    called without arguments.

    Raises:
        SchemaError: naming the function and the unsupported keyword of its parameters.
    """
    options: list[Node] = []
    for name, schema in tools.parameters.items():
        schema = {**schema, **_WITHOUT_MEMBERS} if _is_without_members(schema) else schema
        arguments = from_schema(schema, f"/{name}", allowance)
        options.append(then(f'{CALL_START}"{name}", "arguments": ', arguments, CALL_END))
    if tools.may_answer:
        other = chars(complement([(ord("<"), ord("<"))]))
        options.append(maybe(then(other, Repeat(chars(ANY)))))
    return either(options)


def _is_without_members(schema: Any) -> bool:
    """Return whether the schema of a function's arguments neither names nor requires a member."""
    return (
        isinstance(schema, dict)
        and schema.get("type", "object") == "object"
        and not schema.get("properties")
        and not schema.get("required")
        and not schema.get("additionalProperties")
        and schema.keys() <= ANNOTATIONS | TYPES["object"] | {"type"}
    )

# SPDX-License-Identifier: Apache-2.0
"""Expression of answers that are calls of functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.diffusion.guided.json_schema import SchemaError, from_schema
from vllm.diffusion.guided.regex import ANY
from vllm.diffusion.guided.syntax import Repeat, chars, complement, either, maybe, then

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.diffusion.guided.syntax import Node

CALL_START = '<tool_call>\n{"name": '
CALL_END = "}\n</tool_call>"


class Tools(NamedTuple):
    """Functions that an answer may call.

    Attributes:
        parameters: by name of a function, the schema of its arguments.
        may_answer: whether the answer may be text instead.
    """

    parameters: Mapping[str, Any]
    may_answer: bool


def calls(tools: Tools) -> Node:
    """Make the expression of one call of any of the functions.

    Where text is allowed, it must not look like a call.

    Raises:
        SchemaError: naming the function and the keyword of its parameters that cannot be had.
    """
    options: list[Node] = []
    for name, schema in tools.parameters.items():
        try:
            arguments = from_schema(schema)
        except SchemaError as error:
            raise SchemaError(f"/{name}{error.place}", error.keyword, error.why) from None
        options.append(then(f'{CALL_START}"{name}", "arguments": ', arguments, CALL_END))
    if tools.may_answer:
        other = chars(complement([(ord("<"), ord("<"))]))
        options.append(maybe(then(other, Repeat(chars(ANY)))))
    return either(options)

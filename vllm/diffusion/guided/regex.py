# SPDX-License-Identifier: Apache-2.0
"""Regular expressions in the syntax of Python's `re`, without what is not regular."""

from __future__ import annotations

import re
import sys
from functools import cache
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

from vllm.diffusion.guided.syntax import (
    LAST_CODE_POINT,
    Either,
    Repeat,
    Then,
    chars,
    complement,
    either,
    then,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.guided.syntax import Node, Range

    Encode = Callable[[list[Range]], Node]

ANY: list[Range] = [(0, LAST_CODE_POINT)]
_NO_LINE_END = complement([(ord("\n"), ord("\n"))])
_WORD: list[Range] = [(48, 57), (65, 90), (95, 95), (97, 122)]
_STARTS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
_ENDS = (ops.AT_END, ops.AT_END_STRING)
# ASCII characters of a category, by name.
_CATEGORIES: dict[str, list[Range]] = {
    "DIGIT": [(48, 57)],
    "SPACE": [(9, 13), (32, 32)],
    "WORD": _WORD,
}


class UnsupportedPatternError(ValueError):
    """A pattern is no regular expression, or uses unsupported syntax, which is named."""


def regex(pattern: str, encode: Encode = chars, *, searches: bool = False) -> Node:
    """Make the expression of what `pattern` matches as a whole.

    Digits, spaces and word characters are those of ASCII, where characters are asked for; where
    they are excluded, those of Unicode are excluded too.

    Args:
        pattern: the expression.
        encode: function of ranges of characters that returns how one of them is written.
        searches: whether anything may stand before and behind, where no anchor forbids it.

    Raises:
        UnsupportedPatternError: it cannot be had.
    """
    try:
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedPatternError(f"it is no regular expression: {error}") from None
    if parsed.state.flags & ~re.UNICODE:
        raise UnsupportedPatternError("flags inside of it are not supported")
    items = list(parsed)
    branches = [items]
    if len(items) == 1 and items[0][0] is ops.BRANCH:
        branches = [list(branch) for branch in items[0][1][1]]
    around = Repeat(encode(ANY)) if searches else Then()
    return either(_anchored(branch, around, encode) for branch in branches)


def _anchored(items: list[Any], around: Node, encode: Encode) -> Node:
    before = after = around
    while items and items[0][0] is ops.AT and items[0][1] in _STARTS:
        before, items = Then(), items[1:]
    while items and items[-1][0] is ops.AT and items[-1][1] in _ENDS:
        after, items = Then(), items[:-1]
    return then(before, _sequence(items, encode), after)


def _sequence(items: Any, encode: Encode) -> Node:
    return Then(tuple(_item(op, value, encode) for op, value in items))


def _item(op: Any, value: Any, encode: Encode) -> Node:
    if op is ops.LITERAL:
        return encode([(value, value)])
    if op is ops.NOT_LITERAL:
        return encode(complement([(value, value)]))
    if op is ops.ANY:
        return encode(_NO_LINE_END)
    if op is ops.IN:
        return encode(_members(value))
    if op is ops.BRANCH:
        return Either(tuple(_sequence(branch, encode) for branch in value[1]))
    if op is ops.SUBPATTERN and not value[1] and not value[2]:
        return _sequence(value[3], encode)
    if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
        least, most, inner = value
        return Repeat(_sequence(inner, encode), least, None if most is ops.MAXREPEAT else most)
    name = value if op is ops.AT else op
    raise UnsupportedPatternError(f"{str(name).lower()} is not supported there")


def _members(items: list[Any]) -> list[Range]:
    """Return the code points of a set in brackets."""
    is_negated = items[0][0] is ops.NEGATE
    found: list[Range] = []
    for op, value in items[is_negated:]:
        if op is ops.LITERAL:
            found.append((value, value))
        elif op is ops.RANGE:
            found.append(value)
        elif op is ops.CATEGORY:
            found += _category(str(value), widest=is_negated)
        else:
            raise UnsupportedPatternError(f"{str(op).lower()} is not supported in brackets")
    return complement(found) if is_negated else found


def _category(name: str, *, widest: bool) -> list[Range]:
    """Return the characters of a category by any definition; or, `widest`, by some definition."""
    *_, kind = name.split("_")
    is_other = "NOT" in name
    ranges = _widest(kind) if widest != is_other else _CATEGORIES[kind]
    return complement(ranges) if is_other else ranges


@cache
def _widest(kind: str) -> list[Range]:
    """Return all characters of a category by Unicode; for words, all that are not ASCII."""
    if kind == "WORD":
        return [*_WORD, (128, LAST_CODE_POINT)]
    belongs = str.isdecimal if kind == "DIGIT" else str.isspace
    return [(point, point) for point in range(sys.maxunicode + 1) if belongs(chr(point))]

# SPDX-License-Identifier: Apache-2.0
"""Regular expressions in the syntax of Python's `re`, without the syntax that is not regular."""

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
    count_nodes,
    either,
    repeat,
    then,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.guided.syntax import Node, Range

    Encode = Callable[[list[Range]], Node]

MAX_PATTERN = 20_000  # characters of a pattern
MAX_CHARACTER_PARTS = 100_000  # parts of the characters and sets of a pattern, each counted once
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
    """A pattern is invalid, or uses unsupported syntax, which the message names."""


def regex(
    pattern: str, encode: Encode = chars, *, searches: bool = False, origin: str = ""
) -> Node:
    """Return the expression of the texts that `pattern` matches as a whole.

    Positive classes of digits, spaces and word characters contain only ASCII characters. Negated
    classes exclude the Unicode characters, too.

    Args:
        pattern: the regular expression.
        encode: function from ranges of characters to the expression of one such character.
        searches: whether any text may precede and follow the match, unless an anchor forbids it.
        origin: source of the pattern, the prefix of errors about its repetitions.

    Raises:
        UnsupportedPatternError: the pattern is not supported.
    """
    if len(pattern) > MAX_PATTERN:
        why = f"it has {len(pattern)} characters; wanted at most {MAX_PATTERN}"
        raise UnsupportedPatternError(why)
    try:
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise UnsupportedPatternError(f"it is no regular expression: {error}") from None
    if parsed.state.flags & ~re.UNICODE:
        raise UnsupportedPatternError("flags inside of it are not supported")
    return _Expressions(encode, origin).whole(list(parsed), searches=searches)


class _Expressions:
    """Converts the parts of one parsed pattern to expressions."""

    def __init__(self, encode: Encode, origin: str) -> None:
        self._encode, self._origin = encode, origin
        self._known: dict[tuple[Range, ...], Node] = {}
        self._num_parts = 0

    def whole(self, items: list[Any], *, searches: bool) -> Node:
        branches = [items]
        if len(items) == 1 and items[0][0] is ops.BRANCH:
            branches = [list(branch) for branch in items[0][1][1]]
        around = Repeat(self._encode(ANY)) if searches else Then()
        return either(self._anchored(branch, around) for branch in branches)

    def _anchored(self, items: list[Any], around: Node) -> Node:
        first, last, before, after = 0, len(items), around, around
        while first < last and items[first][0] is ops.AT and items[first][1] in _STARTS:
            before, first = Then(), first + 1
        while first < last and items[last - 1][0] is ops.AT and items[last - 1][1] in _ENDS:
            after, last = Then(), last - 1
        return then(before, self._sequence(items[first:last]), after)

    def _sequence(self, items: Any) -> Node:
        return Then(tuple(self._item(op, value) for op, value in items))

    def _item(self, op: Any, value: Any) -> Node:
        if op is ops.LITERAL:
            return self._character([(value, value)])
        if op is ops.NOT_LITERAL:
            return self._character(complement([(value, value)]))
        if op is ops.ANY:
            return self._character(_NO_LINE_END)
        if op is ops.IN:
            return self._character(_members(value))
        if op is ops.BRANCH:
            return Either(tuple(self._sequence(branch) for branch in value[1]))
        if op is ops.SUBPATTERN and not value[1] and not value[2]:
            return self._sequence(value[3])
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            minimum, maximum, inner = value
            maximum = None if maximum is ops.MAXREPEAT else maximum
            times = (
                str(minimum)
                if minimum == maximum
                else f"{minimum},{'' if maximum is None else maximum}"
            )
            origin = f"{self._origin}repetition {{{times}}}"
            return repeat(self._sequence(inner), minimum, maximum, origin)
        name = value if op is ops.AT else op
        raise UnsupportedPatternError(f"{str(name).lower()} is not supported there")

    def _character(self, ranges: list[Range]) -> Node:
        """Return the expression of a character of `ranges`; equal ranges share one expression."""
        key = tuple(ranges)
        if key not in self._known:
            self._known[key] = node = self._encode(ranges)
            self._num_parts += len(ranges) + count_nodes(node)
            if self._num_parts > MAX_CHARACTER_PARTS:
                why = f"its sets have more than {MAX_CHARACTER_PARTS} parts; wanted at most as many"
                raise UnsupportedPatternError(why)
        return self._known[key]


def _members(items: list[Any]) -> list[Range]:
    """Return the code points of a set in brackets."""
    is_negated = items[0][0] is ops.NEGATE
    members: list[Range] = []
    for op, value in dict.fromkeys(items[is_negated:]):
        if op is ops.LITERAL:
            members.append((value, value))
        elif op is ops.RANGE:
            members.append(value)
        elif op is ops.CATEGORY:
            members += _category(str(value), widest=is_negated)
        else:
            raise UnsupportedPatternError(f"{str(op).lower()} is not supported in brackets")
    return complement(members) if is_negated else members


def _category(name: str, *, widest: bool) -> list[Range]:
    """Return a category's characters by all of its definitions, or if `widest` by any of them."""
    *_, kind = name.split("_")
    is_other = "NOT" in name
    ranges = _widest(kind) if widest != is_other else _CATEGORIES[kind]
    return complement(ranges) if is_other else ranges


@cache
def _widest(kind: str) -> list[Range]:
    """Return a category's characters in Unicode; for words, including all non-ASCII characters."""
    if kind == "WORD":
        return [*_WORD, (128, LAST_CODE_POINT)]
    belongs = str.isdecimal if kind == "DIGIT" else str.isspace
    return [(point, point) for point in range(sys.maxunicode + 1) if belongs(chr(point))]

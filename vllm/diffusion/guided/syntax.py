# SPDX-License-Identifier: Apache-2.0
"""Expressions over bytes that define languages; all are regular, and all texts are UTF-8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LAST_CODE_POINT = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_LAST_OF_LENGTH = (0x7F, 0x7FF, 0xFFFF, LAST_CODE_POINT)

_LARGEST_COUNT = 10**12  # parts; larger counts are treated as equal

Range: TypeAlias = tuple[int, int]  # code points or bytes, inclusive


@dataclass(frozen=True)
class Byte:
    """One byte of a set; bit b of `mask` is set if the set contains byte b."""

    mask: int


@dataclass(frozen=True)
class Then:
    """Parts in sequence; without parts, the empty text."""

    parts: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Either:
    """One of several options; without options, no text at all."""

    options: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Repeat:
    """`minimum` to `maximum` repetitions of a node; None is unbounded.

    `origin` is the part of a format that requests the repetitions, or "".
    """

    node: Node
    minimum: int = 0
    maximum: int | None = None
    origin: str = ""


@dataclass(frozen=True)
class Multiple:
    """A decimal multiple of `factor`, including zero, without sign or leading zeros."""

    factor: int


Node: TypeAlias = "Byte | Then | Either | Repeat | Multiple"


def text(string: str) -> Node:
    """Return the expression of exactly this text."""
    return Then(tuple(Byte(1 << byte) for byte in string.encode()))


def then(*parts: Node | str) -> Node:
    """Concatenate parts; strings match themselves."""
    return Then(tuple(text(part) if isinstance(part, str) else part for part in parts))


def either(options: Iterable[Node | str]) -> Node:
    """Return the alternative of options; strings match themselves."""
    nodes = tuple(text(option) if isinstance(option, str) else option for option in options)
    return nodes[0] if len(nodes) == 1 else Either(nodes)


def repeat(node: Node, minimum: int, maximum: int | None, origin: str = "") -> Node:
    """Return the expression of repetitions; nested repetitions are merged if possible.

    `(x{0,m}){a,b}` is `x{0,mb}` and `(x{1,m}){a,b}` is `x{a,mb}`, because every number in between
    is possible.
    """
    while isinstance(node, Then) and len(node.parts) == 1:
        node = node.parts[0]
    if not isinstance(node, Repeat) or node.minimum > 1:
        return Repeat(node, minimum, maximum, origin)
    is_open = None in (maximum, node.maximum) and 0 not in (maximum, node.maximum)
    times = None if is_open else (maximum or 0) * (node.maximum or 0)
    return Repeat(node.node, minimum * node.minimum, times, origin)


def maybe(node: Node) -> Node:
    return Repeat(node, 0, 1)


def chars(ranges: Iterable[Range]) -> Node:
    """Return the expression of one character of `ranges` in UTF-8, without surrogates."""
    mask, longer = 0, []
    for first, last in _without_surrogates(ranges):
        for low, high in _of_equal_length(first, last):
            if high <= _LAST_OF_LENGTH[0]:
                mask |= _byte_mask(low, high)
            else:
                longer += _sequences(chr(low).encode(), chr(high).encode())
    options = [Byte(mask)] if mask else []
    return either([*options, *longer]) if options or longer else Either()


def complement(ranges: Iterable[Range]) -> list[Range]:
    """Return all code points that are in none of `ranges`."""
    gaps, start = [], 0
    for first, last in sorted(ranges):
        if first > start:
            gaps.append((start, first - 1))
        start = max(start, last + 1)
    return [*gaps, (start, LAST_CODE_POINT)] if start <= LAST_CODE_POINT else gaps


def _byte_mask(first: int, last: int) -> int:
    return (1 << (last + 1)) - (1 << first)


def _without_surrogates(ranges: Iterable[Range]) -> Iterable[Range]:
    for first, last in ranges:
        for low, high in ((first, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, last)):
            if max(first, low) <= min(last, high):
                yield max(first, low), min(last, high)


def _of_equal_length(first: int, last: int) -> Iterable[Range]:
    """Split a range into parts whose characters have equal length in UTF-8."""
    for bound in _LAST_OF_LENGTH:
        if first <= min(last, bound):
            yield first, min(last, bound)
            first = bound + 1


def _sequences(low: bytes, high: bytes) -> list[Node]:
    """Return expressions of the byte sequences from `low` to `high`, which have equal length."""
    if len(low) == 1:
        return [Byte(_byte_mask(low[0], high[0]))]
    minimum, maximum = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    if low[0] == high[0]:
        return [Then((_one(low[0]), rest)) for rest in _sequences(low[1:], high[1:])]
    options: list[Node] = []
    first, last = low[0], high[0]
    if low[1:] != minimum:
        options += [Then((_one(first), rest)) for rest in _sequences(low[1:], maximum)]
        first += 1
    if high[1:] != maximum:
        options += [Then((_one(last), rest)) for rest in _sequences(minimum, high[1:])]
        last -= 1
    if first <= last:
        whole = _sequences(minimum, maximum)
        options += [Then((Byte(_byte_mask(first, last)), rest)) for rest in whole]
    return options


def _one(byte: int) -> Byte:
    return Byte(1 << byte)


def count_nodes(node: Node, known: dict[int, int] | None = None) -> int:
    """Return an upper bound of the states of an automaton of `node`, with repetitions expanded.

    Args:
        node: the expression; a node that occurs several times is counted once and multiplied.
        known: counts by id of nodes that are kept elsewhere; filled.
    """
    known = {} if known is None else known
    if isinstance(node, Byte):
        return 1
    if id(node) not in known:
        known[id(node)] = min(_count_parts(node, known), _LARGEST_COUNT)
    return known[id(node)]


def _count_parts(node: Then | Either | Repeat | Multiple, known: dict[int, int]) -> int:
    if isinstance(node, Multiple):
        return node.factor + 1
    if isinstance(node, Repeat):
        times = node.minimum + 1 if node.maximum is None else max(node.maximum, 1)
        return times * (count_nodes(node.node, known) + 1)
    inner: Sequence[Node] = node.parts if isinstance(node, Then) else node.options
    return 1 + sum(count_nodes(part, known) for part in inner)


def largest_repeat(node: Node) -> str:
    """Return the origin of the repetition with the most parts, or "" if no repetition has one."""
    known: dict[int, int] = {}
    count_nodes(node, known)
    best, origin, seen, waiting = 0, "", set(), [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (Byte, Multiple)) or id(node) in seen:
            continue
        seen.add(id(node))
        if not isinstance(node, Repeat):
            waiting += node.parts if isinstance(node, Then) else node.options
            continue
        waiting.append(node.node)
        if node.origin and known[id(node)] > best:
            best, origin = known[id(node)], node.origin
    return origin

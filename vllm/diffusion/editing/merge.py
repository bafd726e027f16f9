# SPDX-License-Identifier: Apache-2.0
"""Merges a snippet with the code that it changes, where its context lines decide the places.

A snippet consists of blocks between marker lines such as `// ... existing code ...`. A marker is in
place of lines that stay. The first and the last lines of a block are context: lines of the original
that show which lines the block replaces.

The result is certain only if the context of every block appears once, and if a block does not
replace lines outside the indented part of the code that it is in. Otherwise there is no result.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.editing.differences import lines_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_DOTS = r"(?:\.\.\.|\u2026)"
_LEADER = r"(?:#+|//+|--+|/\*+|<!--|;+|%+|\{/\*)"
# A comment that consists of dots, or a line with text between dots.
_MARKER = re.compile(
    rf"\s*(?:{_LEADER}\s*{_DOTS}(?:.*{_DOTS})?|{_DOTS}\s*[A-Za-z].*{_DOTS})\s*(?:\*/\}}?|-->)?\s*"
)

_WORD = re.compile(r"\w")


class _SnippetBlock(NamedTuple):
    """Lines of a snippet between two markers.

    Attributes:
        lines: the lines.
        follows, precedes: whether a marker is before and after the block.
    """

    lines: list[str]
    follows: bool
    precedes: bool


def merged(original: str, snippet: str) -> str | None:
    """Return the original with the changes of a snippet; None if a place is not certain.

    Lines outside the blocks keep their bytes. Context matches if only the white space at the end of
    lines differs.
    """
    blocks = _blocks(lines_of(snippet))
    if blocks is None:
        return None
    old = lines_of(original)
    result, done = list[str](), 0
    for block in blocks:
        place = _place(block, old, done)
        if place is None:
            return None
        start, stop = place
        kept = old[done:start]
        result += [*_closed(kept, has_more=True), *block.lines]
        done = stop
    result = [*_closed(result, has_more=done < len(old)), *old[done:]]
    text = "".join(result)
    if not blocks[-1].precedes and not original.endswith("\n"):
        return text.removesuffix("\n")
    return text


def is_marker(line: str) -> bool:
    """Whether a line of a snippet is in place of lines of the original."""
    return _MARKER.fullmatch(line.rstrip("\r\n")) is not None


def _closed(lines: Sequence[str], *, has_more: bool) -> list[str]:
    """Return lines whose last one ends with a line feed if more lines follow."""
    if not has_more or not lines or lines[-1].endswith("\n"):
        return list(lines)
    return [*lines[:-1], f"{lines[-1]}\n"]


def _blocks(snippet: Sequence[str]) -> list[_SnippetBlock] | None:
    """Return the blocks of a snippet; None if it has no marker or no block."""
    blocks, lines, follows = list[_SnippetBlock](), list[str](), False
    for line in snippet:
        if not is_marker(line):
            lines.append(line)
            continue
        if _has_text(lines):
            blocks.append(_SnippetBlock(lines, follows, precedes=True))
        lines, follows = [], True
    if not follows:
        return None
    if _has_text(lines):
        blocks.append(_SnippetBlock(lines, follows, precedes=False))
    return blocks or None


def _has_text(lines: Sequence[str]) -> bool:
    return any(line.strip() for line in lines)


def _place(block: _SnippetBlock, old: Sequence[str], done: int) -> tuple[int, int] | None:
    """Return the lines [start, stop) of the original that a block replaces, from `done` on."""
    new = [line.rstrip() for line in block.lines]
    known = [line.rstrip() for line in old]
    size, start, stop = 0, done, len(known)
    if block.follows:
        first = _first_lines(new, known, done)
        if first is None:
            return None
        start, size = first
    if not block.precedes:
        return start, stop
    if size == len(new):  # the block only repeats lines
        return start, start + size
    last = _last_lines(new[size:], known, start + size)
    return None if last is None else (start, last)


def _first_lines(new: Sequence[str], known: Sequence[str], done: int) -> tuple[int, int] | None:
    """Return where the first lines of a block appear, and how many of them; None if not once."""
    for size in range(len(new), 0, -1):
        places = _places(new[:size], known, done)
        if places:
            is_certain = len(places) == 1 and _has_text(new[:size])
            return (places[0], size) if is_certain else None
    return None


def _last_lines(new: Sequence[str], known: Sequence[str], done: int) -> int | None:
    """Return the end of the lines that a block ends with; None if it is not certain.

    Args:
        new: the lines of the block after its first context.
        known: lines of the original.
        done: end of the first context in the original.
    """
    for size in range(len(new), 0, -1):
        places, context = _places(new[-size:], known, done), new[-size:]
        if not places or not _has_text(context):
            continue
        replaced, changed = known[done : places[0]], new[:-size]
        if not any(_WORD.search(line) for line in context):
            # Only brackets: they must close the part that the block is in.
            depth = _depth([context[0]])
            is_inside = min(_depth(replaced), _depth(changed)) > depth
            return places[0] + size if is_inside else None
        is_inside = _depth(replaced) >= _depth(new)
        return places[0] + size if len(places) == 1 and is_inside else None
    return None


def _depth(lines: Sequence[str]) -> float:
    """Return the smallest indentation of lines with text; infinite if there are none."""
    return min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=math.inf)


def _places(lines: Sequence[str], known: Sequence[str], start: int) -> list[int]:
    size = len(lines)
    return [
        at
        for at in range(start, len(known) - size + 1)
        if known[at] == lines[0] and list(known[at : at + size]) == list(lines)
    ]

# SPDX-License-Identifier: Apache-2.0
"""How a revised text differs from the text that it began with."""

from __future__ import annotations

import difflib
import io
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Edit(NamedTuple):
    """Tokens [start, stop) of the old text, which `new_ids` replace."""

    start: int
    stop: int
    old_ids: list[int]
    new_ids: list[int]


def edits_between(old: Sequence[int], new: Sequence[int]) -> list[Edit]:
    """Return the edits that turn `old` into `new`, position by position.

    If the lengths differ, the last edit replaces or adds the end.
    """
    common = min(len(old), len(new))
    edits = [
        Edit(run[0], run[-1] + 1, [old[i] for i in run], [new[i] for i in run])
        for differs, group in groupby(range(common), lambda i: old[i] != new[i])
        if differs
        for run in [list(group)]
    ]
    if len(old) == len(new):
        return edits
    start = common
    if edits and edits[-1].stop == common:
        start = edits.pop().start
    return [*edits, Edit(start, len(old), list(old[start:]), list(new[start:]))]


def moving_edits(old: Sequence[int], new: Sequence[int]) -> list[Edit]:
    """Return few edits that turn `old` into `new` if tokens were also deleted and inserted."""
    codes = difflib.SequenceMatcher(None, old, new).get_opcodes()
    return [
        Edit(start, stop, list(old[start:stop]), list(new[begin:end]))
        for kind, start, stop, begin, end in codes
        if kind != "equal"
    ]


def applied(old: Sequence[int], edits: Iterable[Edit]) -> list[int]:
    """Return the tokens after edits, which ascend and do not overlap."""
    tokens, end = list[int](), 0
    for edit in edits:
        tokens += [*old[end : edit.start], *edit.new_ids]
        end = edit.stop
    return [*tokens, *old[end:]]


def unified_diff(old: str, new: str, name: str = "canvas") -> str:
    """Return the difference of two texts as a unified diff; empty if they are equal."""
    lines = difflib.unified_diff(lines_of(old), lines_of(new), f"a/{name}", f"b/{name}")
    marked = (
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
    return "".join(marked)


def lines_of(text: str) -> list[str]:
    """Return the lines of a text with their ends; only a line feed ends a line."""
    return list(io.StringIO(text, newline="\n"))

# SPDX-License-Identifier: Apache-2.0
"""Reads the tags of Inception's edit and apply requests.

User code may contain the tags, for example in a string. So the text is scanned once from the
start, and only the first tag of each kind counts.
"""

from __future__ import annotations

from typing import NamedTuple

CURSOR = "<|cursor|>"


class TaggedText(NamedTuple):
    """The text between an opening tag and its closing tag.

    Attributes:
        start, stop: characters of the whole text, with both tags.
        text: the characters between the tags, without the line feed after the opening tag.
    """

    start: int
    stop: int
    text: str


class EditCall(NamedTuple):
    """The content of an edit request.

    Attributes:
        context: the content without the tags around the code to edit.
        region: the code to edit, without the cursor. If the closing tag has a line of its own, the
            line feed before it is included.
        cursor: the cursor's character in the region; None if there is no cursor.
    """

    context: str
    region: str
    cursor: int | None


class TagError(ValueError):
    """A tag is missing or appears twice; the message has the tag and the fault."""


def part_of(text: str, name: str, start: int = 0) -> TaggedText | None:
    """Return the first part with the tags of a name; None if there is no opening tag.

    Raises:
        TagError: the closing tag is missing.
    """
    opening, closing = f"<|{name}|>", f"<|/{name}|>"
    at = text.find(opening, start)
    if at < 0:
        return None
    begin = at + len(opening)
    begin += text.startswith("\n", begin)
    end = text.find(closing, begin)
    if end < 0:
        raise TagError(f"{closing} is missing")
    return TaggedText(at, end + len(closing), text[begin:end])


def read_edit(content: str) -> EditCall:
    """Read the content of an edit request.

    Args:
        content: the message of the user.

    Raises:
        TagError: the code to edit is missing, or its tags appear twice.
    """
    name = "code_to_edit"
    part = part_of(content, name)
    if part is None:
        raise TagError(f"<|{name}|> is missing")
    if content.find(f"<|{name}|>", part.stop) >= 0:
        raise TagError(f"<|{name}|> appears twice")
    before, has_cursor, after = part.text.partition(CURSOR)
    kept = f"{content[: part.start]}{part.text}{content[part.stop :].removeprefix(chr(10))}"
    return EditCall(kept, before + after, len(before) if has_cursor else None)


def lines_around(text: str, cursor: int, *, above: int, below: int) -> tuple[int, int]:
    """Return the characters [start, stop) of the cursor's line and of lines above and below it.

    The line feed at the end is not included.
    """
    start = text.rfind("\n", 0, cursor) + 1
    for _ in range(above):
        if start == 0:
            break
        start = text.rfind("\n", 0, start - 1) + 1
    stop = cursor
    for _ in range(below + 1):
        end = text.find("\n", stop)
        if end < 0:
            return start, len(text)
        stop = end + 1
    return start, stop - 1


def read_apply(content: str) -> tuple[str, str]:
    """Return the original code and the snippet of an apply request.

    Raises:
        TagError: one of them is missing.
    """
    texts = []
    at = 0
    for name in ("original_code", "update_snippet"):
        part = part_of(content, name, at)
        if part is None:
            raise TagError(f"<|{name}|> is missing")
        at = part.stop
        texts.append(part.text.removesuffix("\n"))
    return texts[0], texts[1]

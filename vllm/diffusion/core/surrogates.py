# SPDX-License-Identifier: Apache-2.0
"""Lone surrogates: halves of a UTF-16 pair, which Python strings may contain but UTF-8 cannot.

A client that splits a text within an emoji sends one as JSON's `"\\ud83d"`. Tokenizers and the
engine's messages use UTF-8, so such a text must be refused before it reaches them.
"""

from __future__ import annotations

import re
from typing import Any

from vllm.diffusion.core.errors import InvalidParameterError

_LONE = re.compile("[\ud800-\udfff]")
_Path = tuple[Any, str | int]  # path of the parent (None at the root); a key or an index
_SHOWN = 20  # characters shown before a lone surrogate, to help find it in a long text


def refuse_lone_surrogates(value: Any, field: str = "") -> None:
    """Refuse a value with a lone surrogate in a text or in a key.

    The work is linear in the size of the value, at any depth of nesting.

    Args:
        value: strings, lists, tuples and dicts of them; other values are ignored.
        field: path of the value in the request.

    Raises:
        InvalidParameterError: naming the path of the text.
    """
    pending: list[tuple[Any, _Path]] = [(value, (None, field))]
    while pending:
        node, path = pending.pop()
        if isinstance(node, str):
            _check(node, path)
        elif isinstance(node, dict):
            for key in node:
                if isinstance(key, str):
                    _check(key, path)
            pending += [(node[key], (path, str(key))) for key in reversed(node)]
        elif isinstance(node, (list, tuple)) and not all(type(item) is int for item in node):
            pending += [(node[n], (path, n)) for n in range(len(node) - 1, -1, -1)]


def _check(text: str, path: _Path) -> None:
    lone = _LONE.search(text)
    if lone is not None:
        start = max(lone.start() - _SHOWN, 0)
        wanted = f"wanted text without half a character (position {lone.start()}, a lone surrogate)"
        raise InvalidParameterError(_written(path), text[start : lone.end()], wanted)


def _written(path: _Path) -> str:
    """Format a path as `messages[0].content`.

    Paths are linked lists, so that walking a value creates no strings.
    """
    steps: list[str] = []
    link: _Path | None = path
    while link is not None:
        link, step = link
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    return "".join(reversed(steps)).lstrip(".") or "body"

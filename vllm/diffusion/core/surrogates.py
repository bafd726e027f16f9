# SPDX-License-Identifier: Apache-2.0
"""Lone surrogates: halves of a UTF-16 pair, which Python's text may hold and no UTF-8 can write.

A client that cuts a text in the middle of an emoji sends one as JSON's `"\\ud83d"`. Tokenizers and
the engine's messages use UTF-8, so such a text has to be refused before either of them reads it.
"""

from __future__ import annotations

import re
from typing import Any

from vllm.diffusion.core.errors import InvalidParameterError

_LONE = re.compile("[\ud800-\udfff]")
_Path = tuple[Any, str | int]  # the path of the parent, None for the whole; a key or an index
_SHOWN = 20  # characters before a lone surrogate, so that its place in a long text can be found


def refuse_lone_surrogates(value: Any, field: str = "") -> None:
    """Refuse a value that holds a lone surrogate in a text or in a key.

    The work is linear in the size of the value, however deep it is nested.

    Args:
        value: strings, lists, tuples and dicts of them; anything else is passed over.
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
    """Write a path as `messages[0].content`; paths are linked, so that walking makes no texts."""
    steps: list[str] = []
    link: _Path | None = path
    while link is not None:
        link, step = link
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    return "".join(reversed(steps)).lstrip(".") or "body"

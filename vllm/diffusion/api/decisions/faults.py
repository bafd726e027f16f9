# SPDX-License-Identifier: Apache-2.0
"""Errors in a body of `/v1/decisions`, and checks of JSON values that raise them.

Messages show values as JSON, because `true` and `"true"` are different choices there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.request.values import in_words

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_SHOWN = 60  # characters of a value or a key in a message


class BodyFault(InvalidParameterError):
    """A body has an unknown field or a value that is not accepted; HTTP 400.

    Args:
        field: path of the field.
        text: the rest of the message.
    """

    def __init__(self, field: str, text: str) -> None:
        super().__init__(field, None, text)
        self.args = (f"{field}: {text}",)
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.field, self.text))


def shown(value: Any) -> str:
    """Return a value as short JSON of one line."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    text = json.dumps(value[: MAX_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def key_of(name: str) -> str:
    """Return a name that the client chose in the form in which paths contain it."""
    name = name if name.isprintable() else ascii(name)
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."


def wanted(path: str, given: Any, description: str) -> BodyFault:
    """Return the fault of a value at a path."""
    return BodyFault(path, f"given {shown(given)}; wanted {description}")


def check_object(
    path: str, value: Any, required: Collection[str], optional: Collection[str]
) -> Mapping[str, Any]:
    """Return a JSON object that has all required keys, and no key that is unknown."""
    if not isinstance(value, dict):
        raise wanted(path, value, "an object")
    for name in value:
        if name not in required and name not in optional:
            raise BodyFault(f"{path}.{key_of(name)}", "unknown parameter")
    for name in required:
        if name not in value:
            raise BodyFault(f"{path}.{name}", "given nothing; wanted a value")
    return value


def check_text(path: str, value: Any, description: str = "a string") -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise wanted(path, value, description)
    return value


def check_one_of(path: str, value: Any, accepted: Collection[str]) -> str:
    """Return a string that is one of several."""
    if not isinstance(value, str) or value not in accepted:
        raise wanted(path, value, in_words(accepted))
    return value


def check_list(path: str, value: Any, minimum: int, maximum: int) -> list[Any]:
    """Return a list with an accepted number of items."""
    if not isinstance(value, list):
        raise wanted(path, value, f"a list of {minimum:,} to {maximum:,}")
    if not minimum <= len(value) <= maximum:
        raise BodyFault(path, f"given {len(value)}; wanted {minimum:,} to {maximum:,}")
    return value

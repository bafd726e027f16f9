# SPDX-License-Identifier: Apache-2.0
"""Keywords of JSON schemas that are enforced, and checks of their values."""

from __future__ import annotations

import math
from typing import Any

ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"),
        *("examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    }
)
TYPES: dict[str, frozenset[str]] = {
    "object": frozenset(
        {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "integer": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
OF_TYPES = frozenset().union(*TYPES.values())

_DAY = "(0[1-9]|1[0-9]|2[0-8])"  # days that every month has
_DATE = rf"[0-9]{{3}}[1-9]-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}\.[a-z]{{2,10}}"
_MAILBOX = r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*"
_PATH = r"(/[A-Za-z0-9._~-]*)*(\?[A-Za-z0-9._~=&-]*)?(#[A-Za-z0-9._~-]*)?"
WHOLE_FORMATS = {"int32": 31, "int64": 63}  # formats of integers: bits without the sign
FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _CLOCK + _ZONE,
    "date-time": f"({_DATE})T{_CLOCK}{_ZONE}",
    "email": f"{_MAILBOX}@{_HOST}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}",
    "hostname": _HOST,
    "uri": f"https?://{_HOST}(:[1-9][0-9]{{0,3}})?{_PATH}",
    "duration": r"P([1-9][0-9]{0,3}D(T[1-9][0-9]{0,3}[HMS])?|T[1-9][0-9]{0,3}[HMS]|[1-9][0-9]?W)",
}


class SchemaError(ValueError):
    """A schema cannot be enforced.

    Attributes:
        place: position in the schema, as a JSON pointer.
        keyword: the invalid keyword.
        why: reason, in words.
    """

    def __init__(self, place: str, keyword: str, why: str) -> None:
        super().__init__(f"{in_line(place or '/')}: {in_line(keyword)}: {in_line(why)}")
        self.place, self.keyword, self.why = place, keyword, why


def in_line(text: str, limit: int = 300) -> str:
    """Return a text from a client in a form that fits into one line."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text if text.isprintable() else ascii(text)[1:-1]


def check_annotations(schema: dict[str, Any], place: str) -> None:
    """Refuse invalid identifiers of a schema. The identifiers are never resolved."""
    for keyword in ("$schema", "$id"):
        given = schema.get(keyword, "")
        if not isinstance(given, str) or given.lower().startswith("file:"):
            raise SchemaError(place, keyword, f"given {given!r}; wanted no address of a file")
    if place and "$id" in schema:
        raise SchemaError(place, "$id", "supported at the root only")


def types_of(schema: dict[str, Any], place: str) -> list[str]:
    """Return the types that a schema names, or else the types to which its keywords apply."""
    given = schema.get("type")
    if "type" not in schema:
        about = [kind for kind, keywords in TYPES.items() if keywords & schema.keys()]
        return about or list(TYPES)
    types: list[Any] = given if isinstance(given, list) and given else [given]
    for kind in types:
        if not isinstance(kind, str) or kind not in TYPES:
            raise SchemaError(place, "type", f"given {kind!r}; wanted some of {', '.join(TYPES)}")
    return [kind for kind in types if not (kind == "integer" and "number" in types)]


def check_format(schema: dict[str, Any], place: str) -> None:
    """Refuse unknown formats. Formats of whole numbers apply only to integers, as bounds."""
    name = schema.get("format", "date")
    if not isinstance(name, str) or name not in (FORMATS.keys() | WHOLE_FORMATS.keys()):
        wanted = ", ".join([*FORMATS, *WHOLE_FORMATS])
        raise SchemaError(place, "format", f"given {name!r}; wanted one of {wanted}")
    if name in WHOLE_FORMATS and schema.get("type") != "integer":
        raise SchemaError(place, "format", f"{name} is supported of type integer only")


def is_finite(value: Any) -> bool:
    """Return whether the value is a finite number; booleans are not numbers."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole or (isinstance(value, float) and math.isfinite(value))


def count_of(schema: dict[str, Any], keyword: str, place: str, default: Any = None) -> Any:
    """Return the whole number of a keyword, or a default."""
    value = schema.get(keyword, default)
    if keyword in schema and not (is_finite(value) and value == int(value) >= 0):
        raise SchemaError(place, keyword, f"given {value!r}; wanted a whole number, 0 or more")
    return None if value is None else int(value)

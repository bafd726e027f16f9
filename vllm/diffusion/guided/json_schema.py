# SPDX-License-Identifier: Apache-2.0
"""Expression of the JSON that a schema allows; every keyword is enforced, or refused by name.

Answers have one form: members in the order of `properties`, none that it does not name, ", " and ":
" between them and no other space, strings with the short escapes. This form is a subset of what the
schema allows.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from vllm.diffusion.guided.numerals import UnsupportedBoundsError, integers, numbers
from vllm.diffusion.guided.regex import UnsupportedPatternError, regex
from vllm.diffusion.guided.syntax import (
    Either,
    Repeat,
    Then,
    chars,
    complement,
    either,
    maybe,
    text,
    then,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm.diffusion.guided.syntax import Node, Range

FREE_DEPTH = 3  # objects and arrays within each other, where any JSON object is asked for
INNER_FREE_DEPTH = 1  # the same of a value inside of a schema that allows any
MOST_COPIES = 5_000  # of schemas, with references written out

_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"),
        *("examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
    }
)
_TYPES: dict[str, frozenset[str]] = {
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
_OF_TYPES = frozenset().union(*_TYPES.values())
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # say all of a value by themselves

_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r"}
_SHORT_ESCAPES["\t"] = "\\t"
_ESCAPED: list[Range] = [(0, 31), (ord('"'), ord('"')), (ord("\\"), ord("\\"))]
_PLAIN = complement(_ESCAPED)


class SchemaError(ValueError):
    """A schema cannot be enforced.

    Attributes:
        place: place in the schema, as a JSON pointer.
        keyword: the keyword at fault.
        why: reason, in words.
    """

    def __init__(self, place: str, keyword: str, why: str) -> None:
        super().__init__(f"{place or '/'}: {keyword}: {why}")
        self.place, self.keyword, self.why = place, keyword, why


def in_json(ranges: Iterable[Range]) -> Node:
    """Make the expression of a character of `ranges` within a JSON string."""
    ranges = list(ranges)
    wanted = [point for first, last in ranges for point in _escaped_between(first, last)]
    escapes = [_SHORT_ESCAPES.get(chr(point), f"\\u{point:04x}") for point in dict.fromkeys(wanted)]
    plain = [
        (max(first, low), min(last, high))
        for first, last in ranges
        for low, high in _PLAIN
        if max(first, low) <= min(last, high)
    ]
    options = [chars(plain)] if plain else []
    return either([*options, *escapes]) if options or escapes else Either()


def _escaped_between(first: int, last: int) -> Iterable[int]:
    for low, high in _ESCAPED:
        yield from range(max(first, low), min(last, high) + 1)


@cache
def _character() -> Node:
    """Any character of a JSON string; of those that must be escaped, the ones with a short form."""
    return either([chars(_PLAIN), *_SHORT_ESCAPES.values()])


def _quoted(inner: Node) -> Node:
    return then('"', inner, '"')


_DAY = "(0[1-9]|1[0-9]|2[0-8])"  # in every month
_DATE = rf"[0-9]{{3}}[1-9]-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_LABEL = "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}\.[a-z]{{2,10}}"
_MAILBOX = r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*"
_PATH = r"(/[A-Za-z0-9._~-]*)*(\?[A-Za-z0-9._~=&-]*)?(#[A-Za-z0-9._~-]*)?"
WHOLE_FORMATS = {"int32": 31, "int64": 63}  # of integers: bits beside the sign
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


def any_object() -> Node:
    """Make the expression of any JSON object, as deep as `FREE_DEPTH`."""
    return _Compiler({}).free_object(FREE_DEPTH)


def from_schema(schema: Any) -> Node:
    """Make the expression of the JSON that a schema allows.

    Raises:
        SchemaError: naming the keyword that cannot be enforced.
    """
    return _Compiler(schema).value(schema, "")


class _Compiler:
    """Compiles the parts of one schema to expressions."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._open: list[str] = []  # references that are being written out
        self._copies = 0

    def value(self, schema: Any, place: str) -> Node:
        self._copies += 1
        if self._copies > MOST_COPIES:
            why = f"more than {MOST_COPIES} schemas with references written out"
            raise SchemaError(place, "$ref", why)
        if schema is True or schema == {}:
            return self.free_value(INNER_FREE_DEPTH)
        if schema is False:
            return Either()
        if not isinstance(schema, dict):
            raise SchemaError(place, "schema", f"given {schema!r}; wanted an object")
        for keyword in schema:
            if keyword not in (_ANNOTATIONS | _OF_TYPES | {"type", *_WHOLE}):
                raise SchemaError(place, keyword, "not supported")
        if place and "$id" in schema:
            raise SchemaError(place, "$id", "supported at the root only")
        _check_format(schema, place)
        whole = [keyword for keyword in _WHOLE if keyword in schema]
        if whole:
            return self._whole(schema, whole[0], place)
        types = _types(schema, place)
        return either([self._typed(kind, schema, place) for kind in types])

    # ---- keywords that say all of a value ----

    def _whole(self, schema: dict[str, Any], keyword: str, place: str) -> Node:
        given, own = schema[keyword], f"{place}/{keyword}"
        if keyword in ("const", "enum"):
            return _listed(schema, keyword, place)
        others = schema.keys() - _ANNOTATIONS - {keyword}
        if others:
            raise SchemaError(place, keyword, f"not supported beside {', '.join(sorted(others))}")
        if keyword == "$ref":
            return self._referred(given, place)
        if not isinstance(given, list) or not given:
            raise SchemaError(place, keyword, "wanted a list of schemas")
        if keyword == "allOf" and len(given) > 1:
            raise SchemaError(place, keyword, "supported of one schema only")
        if keyword == "oneOf" and not self._are_apart(given):
            why = "more than one could hold; wanted schemas of different types or with a property "
            raise SchemaError(place, keyword, why + "whose constants tell them apart, or anyOf")
        return either([self.value(part, f"{own}/{i}") for i, part in enumerate(given)])

    def _referred(self, pointer: Any, place: str) -> Node:
        if pointer in self._open:
            raise SchemaError(place, "$ref", f"{pointer} contains itself")
        self._open.append(pointer)
        node = self.value(self._target(pointer, place), place)
        self._open.pop()
        return node

    def _target(self, pointer: Any, place: str) -> Any:
        found = self._root
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise SchemaError(
                place, "$ref", f"given {pointer!r}; wanted one into the schema: #/..."
            )
        for part in pointer[1:].split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise SchemaError(place, "$ref", f"{pointer} is nowhere") from None
        return found

    def _are_apart(self, options: list[Any]) -> bool:
        """Whether no value can match two of these schemas."""
        known = [self._signs(option) for option in options]
        return all(_tells_apart(one, other) for i, one in enumerate(known) for other in known[:i])

    def _signs(self, schema: Any) -> tuple[set[str], dict[str, list[Any]]]:
        """Return the types of a schema, and the constants of its required properties."""
        for _ in range(MOST_COPIES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"], "")
        if not isinstance(schema, dict) or any(key in schema for key in ("anyOf", "oneOf")):
            return set(_TYPES), {}
        if "const" in schema or "enum" in schema:
            return {_type_of(value) for value in _constants(schema)}, {"": _constants(schema)}
        kinds = set(_types(schema, ""))
        members = schema.get("properties", {}) if isinstance(schema.get("properties"), dict) else {}
        required = schema.get("required", [])
        return kinds, {
            name: _constants(member)
            for name, member in members.items()
            if name in required and isinstance(member, dict) and {"const", "enum"} & member.keys()
        }

    # ---- values of one type ----

    def _typed(self, kind: str, schema: dict[str, Any], place: str) -> Node:
        if kind == "null":
            return text("null")
        if kind == "boolean":
            return either(["true", "false"])
        if kind in ("integer", "number"):
            return _number(schema, place, is_whole=kind == "integer")
        makers: dict[str, Callable[[dict[str, Any], str], Node]] = {
            "string": _string,
            "array": self._array,
            "object": self._object,
        }
        return makers[kind](schema, place)

    def _array(self, schema: dict[str, Any], place: str) -> Node:
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise SchemaError(place, "prefixItems", "wanted a list of schemas")
        least, most = _count(schema, "minItems", place, 0), _count(schema, "maxItems", place)
        items = schema.get("items", True)
        if items is False:
            most = len(first) if most is None else min(most, len(first))
        if schema.get("uniqueItems") not in (None, False) and (most is None or most > 1):
            raise SchemaError(place, "uniqueItems", "not supported; wanted false")
        if most is not None and least > most:
            return Either()
        parts = [self.value(s, f"{place}/prefixItems/{i}") for i, s in enumerate(first[:most])]
        has_more = most is None or most > len(first)
        more = self.value(items, f"{place}/items") if has_more else Either()
        return then("[", _elements(parts, more, least, most), "]")

    def _object(self, schema: dict[str, Any], place: str) -> Node:
        members, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(members, dict):
            raise SchemaError(place, "properties", "wanted an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(place, "required", "wanted a list of names")
        least = _count(schema, "minProperties", place, 0)
        most = _count(schema, "maxProperties", place)
        additional = schema.get("additionalProperties", True)
        if not isinstance(additional, (bool, dict)):
            raise SchemaError(place, "additionalProperties", "wanted a schema")
        members = {**members, **{name: additional for name in required if name not in members}}
        is_open = not members and additional is not False
        count = None if is_open else len(members)
        if least > len(set(required)):
            raise SchemaError(
                place, "minProperties", f"wanted at most the required: {len(required)}"
            )
        if most is not None and (count is None or count > most):
            why = "wanted at least the number of properties, and additionalProperties: false"
            raise SchemaError(place, "maxProperties", why)
        if is_open:
            if additional is True:
                return self.free_object(INNER_FREE_DEPTH)
            return _members_of_any_name(self.value(additional, f"{place}/additionalProperties"))
        pairs = []
        for name, member in members.items():
            pointer = f"{place}/properties/{name.replace('~', '~0').replace('/', '~1')}"
            node = then(json.dumps(name, ensure_ascii=False), ": ", self.value(member, pointer))
            pairs.append((node, name in required))
        return then("{", _members(pairs), "}")

    # ---- values of no schema ----

    def free_value(self, depth: int) -> Node:
        scalars = [self._typed(kind, {}, "") for kind in ("string", "number", "boolean", "null")]
        if depth == 0:
            return either(scalars)
        items = Repeat(then(", ", self.free_value(depth - 1)))
        array = then("[", maybe(then(self.free_value(depth - 1), items)), "]")
        return either([*scalars, array, self.free_object(depth)])

    def free_object(self, depth: int) -> Node:
        return _members_of_any_name(self.free_value(depth - 1))


def _types(schema: dict[str, Any], place: str) -> list[str]:
    """Return the types that a schema names, else those to which its keywords apply."""
    given = schema.get("type")
    if "type" not in schema:
        about = [kind for kind, keywords in _TYPES.items() if keywords & schema.keys()]
        return about or list(_TYPES)
    types: list[Any] = given if isinstance(given, list) and given else [given]
    for kind in types:
        if not isinstance(kind, str) or kind not in _TYPES:
            raise SchemaError(place, "type", f"given {kind!r}; wanted some of {', '.join(_TYPES)}")
    return [kind for kind in types if not (kind == "integer" and "number" in types)]


def _elements(parts: list[Node], more: Node, least: int, most: int | None) -> Node:
    """Elements of an array with commas: those of `parts`, then any number of `more`."""
    rest = None if most is None else max(most - len(parts), 0)
    start = max(least - len(parts), 0)
    if not parts:
        if rest == 0:
            return Then()
        inner = Repeat(then(", ", more), max(start - 1, 0), None if rest is None else rest - 1)
        return then(more, inner) if start else maybe(then(more, inner))
    node: Node = Repeat(then(", ", more), start, rest) if rest != 0 else Then()
    for index in range(len(parts) - 1, -1, -1):
        node = then(", " if index else "", parts[index], node)
        node = node if index < least else maybe(node)
    return node


def _members(pairs: list[tuple[Node, bool]]) -> Node:
    """Members of an object in order, with commas; those that are not required may be missing."""
    first = next((i for i, (_, is_required) in enumerate(pairs) if is_required), len(pairs))

    def behind(start: int) -> list[Node]:
        return [
            then(", ", node) if is_required else maybe(then(", ", node))
            for node, is_required in pairs[start:]
        ]

    if first < len(pairs):
        before = [maybe(then(node, ", ")) for node, _ in pairs[:first]]
        return then(*before, pairs[first][0], *behind(first + 1))
    return maybe(either([then(pairs[i][0], *behind(i + 1)) for i in range(first)]))


def _members_of_any_name(value: Node) -> Node:
    member = then(_quoted(Repeat(_character())), ": ", value)
    return then("{", maybe(then(member, Repeat(then(", ", member)))), "}")


def _string(schema: dict[str, Any], place: str) -> Node:
    given = [key for key in ("format", "pattern") if key in schema]
    lengths = [key for key in ("minLength", "maxLength") if key in schema]
    if len(given) > 1 or (given and lengths):
        both = [*given, *lengths]
        raise SchemaError(place, both[0], f"not supported beside {', '.join(both[1:])}")
    if "format" in schema:
        return _quoted(_format(schema["format"]))
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise SchemaError(place, "pattern", f"given {schema['pattern']!r}; wanted a string")
        try:
            return _quoted(regex(schema["pattern"], in_json, searches=True))
        except UnsupportedPatternError as error:
            raise SchemaError(place, "pattern", str(error)) from None
    least, most = _count(schema, "minLength", place, 0), _count(schema, "maxLength", place)
    if most is not None and least > most:
        return Either()
    return _quoted(Repeat(_character(), least, most))


def _check_format(schema: dict[str, Any], place: str) -> None:
    """Refuse unknown formats; those of whole numbers act as bounds."""
    name = schema.get("format", "date")
    if not isinstance(name, str) or name not in (FORMATS.keys() | WHOLE_FORMATS.keys()):
        wanted = ", ".join([*FORMATS, *WHOLE_FORMATS])
        raise SchemaError(place, "format", f"given {name!r}; wanted one of {wanted}")
    if name in WHOLE_FORMATS and schema.get("type") != "integer":
        raise SchemaError(place, "format", f"{name} is supported of type integer only")


@cache
def _format(name: str) -> Node:
    return regex(FORMATS[name])


def _number(schema: dict[str, Any], place: str, *, is_whole: bool) -> Node:
    bounds = {}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        value = schema.get(keyword)
        if keyword in schema and not _is_finite(value):
            raise SchemaError(place, keyword, f"given {value!r}; wanted a number")
        bounds[keyword] = None if value is None else Decimal(str(value))
    low, above = _tighter(bounds["minimum"], bounds["exclusiveMinimum"], 1)
    high, below = _tighter(bounds["maximum"], bounds["exclusiveMaximum"], -1)
    factor = bounds["multipleOf"]
    if factor is not None and (factor != int(factor) or factor < 1):
        raise SchemaError(place, "multipleOf", "wanted a whole number, 1 or more")
    if low is not None and high is not None and low > high:
        return Either()
    keyword = "multipleOf" if factor is not None else "minimum"
    try:
        if is_whole or factor is not None:
            least = None if low is None else _above(low, above)
            most = None if high is None else -_above(high.copy_negate(), below)
            bits = WHOLE_FORMATS.get(schema.get("format", ""))
            if bits is not None:
                least = max(-(2**bits), -(2**bits) if least is None else least)
                most = min(2**bits - 1, 2**bits - 1 if most is None else most)
            return integers(least, most, None if factor is None else int(factor))
        return numbers(low, high, above=above, below=below)
    except UnsupportedBoundsError as error:
        raise SchemaError(place, keyword, str(error)) from None


def _tighter(
    bound: Decimal | None, exclusive: Decimal | None, sign: int
) -> tuple[Decimal | None, bool]:
    """Return the tighter bound, and whether it is itself excluded."""
    if exclusive is None or (bound is not None and sign * bound > sign * exclusive):
        return bound, False
    return exclusive, True


def _above(bound: Decimal, is_out: bool) -> int:
    """Return the least whole number that a lower bound allows."""
    least = math.ceil(bound)
    return least + 1 if is_out and least == bound else least


def _listed(schema: Mapping[str, Any], keyword: str, place: str) -> Node:
    """Expression of the schema's constants that its other keywords allow."""
    values = _constants(schema)
    if not values:
        raise SchemaError(place, keyword, "wanted a list of values")
    others = {k: v for k, v in schema.items() if k not in _ANNOTATIONS and k != keyword}
    beside = sorted(others.keys() & {"anyOf", "oneOf", "allOf"})
    if beside or '"$ref"' in json.dumps(others):
        named = ", ".join(beside) or "what holds a $ref"
        raise SchemaError(place, keyword, f"not supported beside {named}")
    if others:
        values = _valid(values, others, keyword, place)
    return either([json.dumps(value, ensure_ascii=False) for value in values])


def _valid(values: list[Any], schema: dict[str, Any], keyword: str, place: str) -> list[Any]:
    """Return the values that a schema without references allows."""
    from jsonschema import Draft202012Validator, exceptions

    checker = Draft202012Validator.FORMAT_CHECKER
    check = Draft202012Validator(schema, format_checker=checker)
    try:
        check.check_schema(schema, format_checker=checker)
        return [value for value in values if check.is_valid(value)]
    except (exceptions.SchemaError, ValueError, re.error) as error:
        why = getattr(error, "message", str(error))
        raise SchemaError(place, keyword, f"beside it: {why}") from None


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema["enum"], list) else []


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


def _tells_apart(
    one: tuple[set[str], dict[str, list[Any]]], other: tuple[set[str], dict[str, list[Any]]]
) -> bool:
    kinds, others = (
        {"number" if k == "integer" else k for k in signs[0]} for signs in (one, other)
    )
    if not kinds & others:
        return True
    is_object = kinds == others == {"object"}
    return any(
        not any(value == same for value in one[1][name] for same in other[1][name])
        for name in one[1].keys() & other[1].keys()
        if is_object or name == ""
    )


def _is_finite(value: Any) -> bool:
    """Whether the value is a finite number; booleans are none."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole or (isinstance(value, float) and math.isfinite(value))


def _count(schema: dict[str, Any], keyword: str, place: str, default: Any = None) -> Any:
    value = schema.get(keyword, default)
    if keyword in schema and not (_is_finite(value) and value == int(value) >= 0):
        raise SchemaError(place, keyword, f"given {value!r}; wanted a whole number, 0 or more")
    return None if value is None else int(value)

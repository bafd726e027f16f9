# SPDX-License-Identifier: Apache-2.0
"""Conversion of a JSON schema to an expression; every keyword is enforced, or refused by name.

Answers have one form: members in the order of `properties` without further members, ", " and ": "
as separators without other spaces, and strings with the short escapes. This form is a subset of
what the schema allows.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from vllm.diffusion.guided.allowance import Allowance
from vllm.diffusion.guided.json_values import ValueCheck, key_of, type_of
from vllm.diffusion.guided.numerals import UnsupportedBoundsError, integers, numbers
from vllm.diffusion.guided.regex import UnsupportedPatternError, regex
from vllm.diffusion.guided.schema_keywords import (
    ANNOTATIONS,
    FORMATS,
    OF_TYPES,
    TYPES,
    WHOLE_FORMATS,
    SchemaError,
    check_annotations,
    check_format,
    count_of,
    in_line,
    is_finite,
    types_of,
)
from vllm.diffusion.guided.syntax import (
    Either,
    Repeat,
    Then,
    chars,
    complement,
    either,
    maybe,
    repeat,
    text,
    then,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from vllm.diffusion.guided.syntax import Node, Range

FREE_DEPTH = 3  # nested objects and arrays if any JSON object is allowed
INNER_FREE_DEPTH = 1  # same limit for a value of a schema that allows any value
MAX_SCHEMAS = 5_000  # schemas within one schema, in total
MAX_OPTIONAL = 1_000  # properties of an object without required properties

_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # each determines the whole value

_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r"}
_SHORT_ESCAPES["\t"] = "\\t"
_ESCAPED: list[Range] = [(0, 31), (ord('"'), ord('"')), (ord("\\"), ord("\\"))]
_PLAIN = complement(_ESCAPED)


def in_json(ranges: Iterable[Range]) -> Node:
    """Return the expression of one character of `ranges` within a JSON string."""
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
    """Return any character of a JSON string; escaped ones only if they have a short form."""
    return either([chars(_PLAIN), *_SHORT_ESCAPES.values()])


def _quoted(inner: Node) -> Node:
    return then('"', inner, '"')


def any_object() -> Node:
    """Return the expression of any JSON object, nested up to `FREE_DEPTH`."""
    return _free_object(FREE_DEPTH)


def from_schema(schema: Any, place: str = "", allowance: Allowance | None = None) -> Node:
    """Return the expression of the JSON that a schema allows.

    Args:
        place: its position in what the client sent, as a JSON pointer.

    Raises:
        SchemaError: naming the keyword that cannot be enforced, and its position.
    """
    return _Compiler(schema, place, allowance or Allowance()).value(schema, place)


class _Signs(NamedTuple):
    """Properties that distinguish the values of a schema from the values of another schema.

    Attributes:
        types: types of its values; whole numbers have the type "number", too.
        constants: by name of a required property, the keys of its allowed values; under "", the
            keys of the values that the schema itself lists.
    """

    types: set[str]
    constants: dict[str, set[Hashable]]


class _Compiler:
    """Compiles the parts of one schema to expressions."""

    def __init__(self, root: Any, place: str, allowance: Allowance) -> None:
        self._root, self._place, self._allowance = root, place, allowance
        self._open: list[str] = []  # references that are being expanded
        self._targets: dict[str, Node] = {}  # expressions by reference
        self._num_schemas = 0

    def value(self, schema: Any, place: str) -> Node:
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise SchemaError(place, "schema", f"wanted at most {MAX_SCHEMAS} within each other")
        self._allowance.spend(50)
        if schema is True or schema == {}:
            return _free_value(INNER_FREE_DEPTH)
        if schema is False:
            return Either()
        if not isinstance(schema, dict):
            raise SchemaError(place, "schema", f"given {schema!r}; wanted an object")
        for keyword in schema:
            if keyword not in (ANNOTATIONS | OF_TYPES | {"type", *_WHOLE}):
                raise SchemaError(place, keyword, "not supported")
        check_annotations(schema, place.removeprefix(self._place))
        check_format(schema, place)
        whole = [keyword for keyword in _WHOLE if keyword in schema]
        if whole:
            return self._whole(schema, whole[0], place)
        types = types_of(schema, place)
        return either([self._typed(kind, schema, place) for kind in types])

    # ---- keywords that determine the whole value ----

    def _whole(self, schema: dict[str, Any], keyword: str, place: str) -> Node:
        given, path = schema[keyword], f"{place}/{keyword}"
        if keyword in ("const", "enum"):
            return self._listed(schema, keyword, place)
        others = schema.keys() - ANNOTATIONS - {keyword}
        if others:
            raise SchemaError(place, keyword, f"not supported with {', '.join(sorted(others))}")
        if keyword == "$ref":
            return self._referred(given, place)
        if not isinstance(given, list) or not given:
            raise SchemaError(place, keyword, "wanted a list of schemas")
        if keyword == "allOf" and len(given) > 1:
            raise SchemaError(place, keyword, "supported of one schema only")
        if keyword == "oneOf" and not self._are_apart(given):
            why = "more than one could hold; wanted schemas of different types or with a property "
            raise SchemaError(place, keyword, why + "whose constants tell them apart, or anyOf")
        return either([self.value(part, f"{path}/{i}") for i, part in enumerate(given)])

    def _referred(self, pointer: Any, place: str) -> Node:
        target = self._target(pointer, place)
        if pointer in self._open:
            raise SchemaError(place, "$ref", f"{pointer} contains itself")
        if pointer not in self._targets:
            self._open.append(pointer)
            self._targets[pointer] = self.value(target, place)
            self._open.pop()
        return self._targets[pointer]

    def _target(self, pointer: Any, place: str) -> Any:
        node = self._root
        if not isinstance(pointer, str) or not pointer.startswith("#"):
            raise SchemaError(
                place, "$ref", f"given {pointer!r}; wanted one into the schema: #/..."
            )
        for part in pointer[1:].split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(name)] if isinstance(node, list) else node[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise SchemaError(place, "$ref", f"{pointer} is nowhere") from None
        return node

    def _listed(self, schema: Mapping[str, Any], keyword: str, place: str) -> Node:
        """Return the expression of the schema's constants that its other keywords allow."""
        values = _constants(schema)
        if not values:
            raise SchemaError(place, keyword, "wanted a list of values")
        others = {k: v for k, v in schema.items() if k not in ANNOTATIONS and k != keyword}
        unsupported = sorted(others.keys() & {"anyOf", "oneOf", "allOf", "$ref"})
        if unsupported:
            raise SchemaError(place, keyword, f"not supported with {', '.join(unsupported)}")
        if others:
            try:
                check = ValueCheck(others, place, self._allowance)
            except SchemaError as error:
                why = f"with {keyword}: {error.why}"
                raise SchemaError(error.place, error.keyword, why) from None
            values = [value for value in values if check.allows(value)]
        return either([json.dumps(value, ensure_ascii=False) for value in values])

    def _are_apart(self, options: list[Any]) -> bool:
        """Return whether no value can match two of these schemas."""
        known = [self._signs(option) for option in options]
        return all(
            self._can_distinguish(one, other) for i, one in enumerate(known) for other in known[:i]
        )

    def _can_distinguish(self, one: _Signs, other: _Signs) -> bool:
        self._allowance.spend(4)
        if not one.types & other.types:
            return True
        is_object = one.types == other.types == {"object"}
        for name in one.constants.keys() & other.constants.keys():
            constants, others = one.constants[name], other.constants[name]
            self._allowance.spend(1 + min(len(constants), len(others)) // 8)
            if (is_object or name == "") and constants.isdisjoint(others):
                return True
        return False

    def _signs(self, schema: Any) -> _Signs:
        """Return the types of a schema, and the constants of its required properties."""
        for _ in range(MAX_SCHEMAS):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            schema = self._target(schema["$ref"], self._place)
        if not isinstance(schema, dict) or any(key in schema for key in ("anyOf", "oneOf")):
            return _Signs(_value_types(TYPES), {})
        if "const" in schema or "enum" in schema:
            values = _constants(schema)
            return _Signs({type_of(value) for value in values}, {"": set(map(key_of, values))})
        members = schema.get("properties", {}) if isinstance(schema.get("properties"), dict) else {}
        required = schema.get("required", [])
        names = {name for name in required if isinstance(name, str)} if required else set()
        constants = {
            name: set(map(key_of, _constants(member)))
            for name, member in members.items()
            if name in names and isinstance(member, dict) and {"const", "enum"} & member.keys()
        }
        return _Signs(_value_types(types_of(schema, self._place)), constants)

    # ---- values of one type ----

    def _typed(self, kind: str, schema: dict[str, Any], place: str) -> Node:
        if kind == "array":
            return self._array(schema, place)
        return self._object(schema, place) if kind == "object" else _scalar(kind, schema, place)

    def _array(self, schema: dict[str, Any], place: str) -> Node:
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise SchemaError(place, "prefixItems", "wanted a list of schemas")
        minimum, maximum = (
            count_of(schema, "minItems", place, 0),
            count_of(schema, "maxItems", place),
        )
        items = schema.get("items", True)
        if items is False:
            maximum = len(first) if maximum is None else min(maximum, len(first))
        if schema.get("uniqueItems") not in (None, False) and (maximum is None or maximum > 1):
            raise SchemaError(place, "uniqueItems", "not supported; wanted false")
        if maximum is not None and minimum > maximum:
            return Either()
        parts = [self.value(s, f"{place}/prefixItems/{i}") for i, s in enumerate(first[:maximum])]
        has_more = maximum is None or maximum > len(first)
        more = self.value(items, f"{place}/items") if has_more else Either()
        origin = _origin(schema, place, "maxItems", "minItems")
        return then("[", _elements(parts, more, minimum, maximum, origin), "]")

    def _object(self, schema: dict[str, Any], place: str) -> Node:
        members, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(members, dict):
            raise SchemaError(place, "properties", "wanted an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(place, "required", "wanted a list of names")
        minimum = count_of(schema, "minProperties", place, 0)
        maximum = count_of(schema, "maxProperties", place)
        additional = schema.get("additionalProperties", True)
        if not isinstance(additional, (bool, dict)):
            raise SchemaError(place, "additionalProperties", "wanted a schema")
        names = set(required)
        members = {**members, **{name: additional for name in required if name not in members}}
        is_open = not members and additional is not False
        count = None if is_open else len(members)
        if minimum > len(names):
            raise SchemaError(
                place, "minProperties", f"wanted at most the required: {len(required)}"
            )
        if maximum is not None and (count is None or count > maximum):
            why = "wanted at least the number of properties, and additionalProperties: false"
            raise SchemaError(place, "maxProperties", why)
        if is_open:
            if additional is True:
                return _free_object(INNER_FREE_DEPTH)
            return _members_of_any_name(self.value(additional, f"{place}/additionalProperties"))
        pairs = []
        for name, member in members.items():
            pointer = f"{place}/properties/{name.replace('~', '~0').replace('/', '~1')}"
            node = then(json.dumps(name, ensure_ascii=False), ": ", self.value(member, pointer))
            pairs.append((node, name in names))
        if not names & members.keys() and len(pairs) > MAX_OPTIONAL:
            why = f"given {len(pairs)}, none of them required; wanted at most {MAX_OPTIONAL}"
            raise SchemaError(place, "properties", why)
        return then("{", _members(pairs), "}")


def _scalar(kind: str, schema: dict[str, Any], place: str) -> Node:
    """Return the expression of the values of a type without parts."""
    if kind == "null":
        return text("null")
    if kind == "boolean":
        return either(["true", "false"])
    if kind == "string":
        return _string(schema, place)
    return _number(schema, place, is_whole=kind == "integer")


@cache
def _free_value(depth: int) -> Node:
    """Return the expression of any value, nested up to `depth`."""
    scalars = [_scalar(kind, {}, "") for kind in ("string", "number", "boolean", "null")]
    if depth == 0:
        return either(scalars)
    inner = _free_value(depth - 1)
    array = then("[", maybe(then(inner, Repeat(then(", ", inner)))), "]")
    return either([*scalars, array, _free_object(depth)])


def _free_object(depth: int) -> Node:
    return _members_of_any_name(_free_value(depth - 1))


def _origin(schema: dict[str, Any], place: str, *keywords: str) -> str:
    """Return the position of a repetition, with the first of these keywords that the schema has."""
    for keyword in keywords:
        if keyword in schema:
            return in_line(f"{place or '/'}: {keyword}: given {schema[keyword]!r}")
    return ""


def _elements(
    parts: list[Node], more: Node, minimum: int, maximum: int | None, origin: str
) -> Node:
    """Return the elements of an array with commas: first `parts`, then repetitions of `more`.

    `origin` describes the source of the bounds.
    """
    rest = None if maximum is None else max(maximum - len(parts), 0)
    start = max(minimum - len(parts), 0)
    if not parts:
        if rest == 0:
            return Then()
        others = None if rest is None else rest - 1
        inner = repeat(then(", ", more), max(start - 1, 0), others, origin)
        return then(more, inner) if start else maybe(then(more, inner))
    node: Node = repeat(then(", ", more), start, rest, origin) if rest != 0 else Then()
    for index in range(len(parts) - 1, -1, -1):
        node = then(", " if index else "", parts[index], node)
        node = node if index < minimum else maybe(node)
    return node


def _members(pairs: list[tuple[Node, bool]]) -> Node:
    """Return the members of an object in order, with commas; optional members may be missing."""
    first = next((i for i, (_, is_required) in enumerate(pairs) if is_required), len(pairs))
    behind = [
        then(", ", node) if is_required else maybe(then(", ", node)) for node, is_required in pairs
    ]
    if first < len(pairs):
        before = [maybe(then(node, ", ")) for node, _ in pairs[:first]]
        return then(*before, pairs[first][0], *behind[first + 1 :])
    return maybe(either([then(pairs[i][0], *behind[i + 1 :]) for i in range(first)]))


def _members_of_any_name(value: Node) -> Node:
    member = then(_quoted(Repeat(_character())), ": ", value)
    return then("{", maybe(then(member, Repeat(then(", ", member)))), "}")


def _string(schema: dict[str, Any], place: str) -> Node:
    given = [key for key in ("format", "pattern") if key in schema]
    lengths = [key for key in ("minLength", "maxLength") if key in schema]
    if len(given) > 1 or (given and lengths):
        both = [*given, *lengths]
        raise SchemaError(place, both[0], f"not supported with {', '.join(both[1:])}")
    if "format" in schema:
        return _quoted(_format(schema["format"]))
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise SchemaError(place, "pattern", f"given {schema['pattern']!r}; wanted a string")
        try:
            origin = f"{in_line(place or '/')}: pattern: "
            return _quoted(regex(schema["pattern"], in_json, searches=True, origin=origin))
        except UnsupportedPatternError as error:
            raise SchemaError(place, "pattern", str(error)) from None
    minimum, maximum = count_of(schema, "minLength", place, 0), count_of(schema, "maxLength", place)
    if maximum is not None and minimum > maximum:
        return Either()
    return _quoted(
        repeat(_character(), minimum, maximum, _origin(schema, place, "maxLength", "minLength"))
    )


@cache
def _format(name: str) -> Node:
    return regex(FORMATS[name])


def _number(schema: dict[str, Any], place: str, *, is_whole: bool) -> Node:
    bounds = {}
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
        value = schema.get(keyword)
        if keyword in schema and not is_finite(value):
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
            minimum = None if low is None else _above(low, above)
            maximum = None if high is None else -_above(high.copy_negate(), below)
            bits = WHOLE_FORMATS.get(schema.get("format", ""))
            if bits is not None:
                minimum = max(-(2**bits), -(2**bits) if minimum is None else minimum)
                maximum = min(2**bits - 1, 2**bits - 1 if maximum is None else maximum)
            return integers(minimum, maximum, None if factor is None else int(factor))
        return numbers(low, high, above=above, below=below)
    except UnsupportedBoundsError as error:
        raise SchemaError(place, keyword, str(error)) from None


def _tighter(
    bound: Decimal | None, exclusive: Decimal | None, sign: int
) -> tuple[Decimal | None, bool]:
    """Return the tighter bound, and whether the bound itself is excluded."""
    if exclusive is None or (bound is not None and sign * bound > sign * exclusive):
        return bound, False
    return exclusive, True


def _above(bound: Decimal, is_out: bool) -> int:
    """Return the smallest whole number that a lower bound allows."""
    minimum = math.ceil(bound)
    return minimum + 1 if is_out and minimum == bound else minimum


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema["enum"], list) else []


def _value_types(types: Iterable[str]) -> set[str]:
    """Return the types with "number" for "integer", so that each value has exactly one type."""
    return {"number" if kind == "integer" else kind for kind in types}

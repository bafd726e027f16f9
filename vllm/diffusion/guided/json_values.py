# SPDX-License-Identifier: Apache-2.0
"""Check of constants against the other keywords of their schema.

The check takes time linear in the values and in the schema, and reads nothing else. It matches
patterns with automata, without backtracking.
"""

from __future__ import annotations

import datetime
import ipaddress
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.diffusion.guided.automaton import build
from vllm.diffusion.guided.regex import UnsupportedPatternError, regex
from vllm.diffusion.guided.schema_keywords import (
    ANNOTATIONS,
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

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from vllm.diffusion.guided.allowance import Allowance
    from vllm.diffusion.guided.automaton import Automaton

    Test = Callable[[Any], bool]

_COMBINATIONS = ("anyOf", "oneOf", "allOf")
_KNOWN = (
    ANNOTATIONS
    | OF_TYPES
    | {"type", "const", "enum", "not", *_COMBINATIONS}
    | {"patternProperties", "propertyNames", "contains"}
)
_PART = "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_DATE, _CLOCK = r"\d{4}-\d{2}-\d{2}", r"\d{2}:\d{2}:\d{2}(\.\d+)?([Zz]|[+-]\d{2}:\d{2})"
# Patterns of formatted values, and further parsers of them. The formats of answers are narrower.
_SHAPES = {
    "date": _DATE,
    "time": _CLOCK,
    "date-time": f"{_DATE}[Tt ]{_CLOCK}",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "email": r"[^@\s]+@[^@\s]+",
    "ipv4": r"[0-9.]+",
    "ipv6": r"[0-9A-Fa-f:.]+",
    "hostname": rf"{_PART}(\.{_PART})*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[^\s]*",
    "duration": r"P(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?)",
}
_READERS: dict[str, Any] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
}
_LONGEST_FORMATTED = 1_000  # characters of a value with a format


def key_of(value: Any) -> Hashable:
    """Return a key that is equal for values that are equal by JSON schema."""
    if isinstance(value, dict):
        return "object", frozenset((name, key_of(member)) for name, member in value.items())
    if isinstance(value, list):
        return "array", tuple(map(key_of, value))
    return isinstance(value, bool), value


def type_of(value: Any) -> str:
    """Return the type of a JSON value; numbers are never "integer"."""
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else kinds.get(type(value), "object")


class ValueCheck:
    """Check of values against a schema without references.

    Args:
        schema: the schema, without annotations that matter.
        place: its position in the client's schema.
        allowance: limits the work of all checks together.

    Raises:
        SchemaError: naming a keyword that cannot be checked.
    """

    def __init__(self, schema: Any, place: str, allowance: Allowance) -> None:
        self._allowance = allowance
        self._automata: dict[str, Automaton] = {}
        self._test = self._whole(schema, place)

    def allows(self, value: Any) -> bool:
        return self._test(value)

    def _whole(self, schema: Any, place: str) -> Test:
        """Return the test of a schema. The keywords of the schema are checked immediately."""
        if isinstance(schema, bool):
            return lambda value: schema
        if not isinstance(schema, dict):
            raise SchemaError(place, "schema", f"given {schema!r}; wanted an object")
        for keyword in schema:
            if keyword not in _KNOWN:
                raise SchemaError(place, keyword, "not supported")
        check_annotations(schema, place)
        if "format" in schema:
            check_format(schema, place)
        self._allowance.spend(10 + len(schema))
        tests = [*self._of_any(schema, place), *self._of_types(schema, place)]

        def test(value: Any) -> bool:
            self._allowance.spend(2 + 2 * len(tests))
            return all(one(value) for one in tests)

        return test

    # ---- keywords of any value ----

    def _of_any(self, schema: dict[str, Any], place: str) -> Iterable[Test]:
        if "type" in schema:
            yield _type_test(types_of(schema, place))
        for keyword in schema.keys() & {"const", "enum"}:
            yield self._listed(schema, keyword, place)
        if "not" in schema:
            never = self._whole(schema["not"], f"{place}/not")
            yield lambda value: not never(value)
        for keyword in _COMBINATIONS:
            if keyword in schema:
                yield self._combined(schema[keyword], keyword, place)

    def _listed(self, schema: dict[str, Any], keyword: str, place: str) -> Test:
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        if not isinstance(values, list):
            raise SchemaError(place, keyword, "wanted a list of values")
        keys = {self._key(value) for value in values}
        return lambda value: self._key(value) in keys

    def _combined(self, schemas: Any, keyword: str, place: str) -> Test:
        if not isinstance(schemas, list) or not schemas:
            raise SchemaError(place, keyword, "wanted a list of schemas")
        tests = [self._whole(one, f"{place}/{keyword}/{i}") for i, one in enumerate(schemas)]
        if keyword == "oneOf":
            return lambda value: sum(test(value) for test in tests) == 1
        join = any if keyword == "anyOf" else all
        return lambda value: join(test(value) for test in tests)

    def _key(self, value: Any) -> Hashable:
        self._allowance.spend(_size(value))
        return key_of(value)

    # ---- keywords of one type ----

    def _of_types(self, schema: dict[str, Any], place: str) -> list[Test]:
        makers = {
            "number": self._of_numbers,
            "string": self._of_strings,
            "array": self._of_arrays,
            "object": self._of_objects,
        }
        checks = []
        for kind, make in makers.items():
            tests = list(make(schema, place))
            if tests:
                checks.append(self._if_type(kind, tests))
        return checks

    def _if_type(self, kind: str, tests: list[Test]) -> Test:
        def test(value: Any) -> bool:
            if type_of(value) != kind:
                return True
            if kind != "number":
                self._allowance.spend(len(value))
            return all(one(value) for one in tests)

        return test

    def _of_numbers(self, schema: dict[str, Any], place: str) -> Iterable[Test]:
        for keyword in TYPES["number"] & schema.keys():
            given = schema[keyword]
            if not is_finite(given):
                raise SchemaError(place, keyword, f"given {given!r}; wanted a number")
            if keyword == "multipleOf" and given <= 0:
                raise SchemaError(place, keyword, f"given {given!r}; wanted a number above 0")
            yield _bound_test(keyword, given)
        bits = WHOLE_FORMATS.get(schema.get("format", ""))
        if bits is not None:
            yield lambda value: -(2**bits) <= value < 2**bits

    def _of_strings(self, schema: dict[str, Any], place: str) -> Iterable[Test]:
        yield from _length_tests(schema, "minLength", "maxLength", place)
        if "pattern" in schema:
            yield self._matching(schema["pattern"], "pattern", place)
        if "format" in schema and schema["format"] not in WHOLE_FORMATS:
            name = schema["format"]
            yield lambda value: _has_format(value, name)

    def _matching(self, pattern: Any, keyword: str, place: str) -> Test:
        """Return the test whether a string contains a match of a pattern."""
        if not isinstance(pattern, str):
            raise SchemaError(place, keyword, f"given {pattern!r}; wanted a string")
        if pattern not in self._automata:
            try:
                node = regex(pattern, searches=True, origin=f"{in_line(place or '/')}: {keyword}: ")
            except UnsupportedPatternError as error:
                raise SchemaError(place, keyword, str(error)) from None
            self._automata[pattern] = build(node, self._allowance)
        automaton = self._automata[pattern]

        def test(value: str) -> bool:
            self._allowance.spend(len(value))
            return automaton.accepts(value.encode())

        return test

    def _of_arrays(self, schema: dict[str, Any], place: str) -> Iterable[Test]:
        yield from _length_tests(schema, "minItems", "maxItems", place)
        first = schema.get("prefixItems", [])
        if not isinstance(first, list):
            raise SchemaError(place, "prefixItems", "wanted a list of schemas")
        if first or "items" in schema:
            tests = [self._whole(one, f"{place}/prefixItems/{i}") for i, one in enumerate(first)]
            rest = self._whole(schema.get("items", True), f"{place}/items")
            count = len(tests)
            yield lambda value: all(test(v) for test, v in zip(tests, value, strict=False))
            yield lambda value: all(rest(v) for v in value[count:])
        if schema.get("uniqueItems", False) is not False:
            yield lambda value: len({self._key(v) for v in value}) == len(value)
        if "contains" in schema:
            within = self._whole(schema["contains"], f"{place}/contains")
            yield lambda value: any(within(v) for v in value)

    def _of_objects(self, schema: dict[str, Any], place: str) -> Iterable[Test]:
        yield from _length_tests(schema, "minProperties", "maxProperties", place)
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(place, "required", "wanted a list of names")
        if required:
            yield self._requiring(required)
        named = self._members(schema, "properties", place)
        patterned = [
            (self._matching(pattern, "patternProperties", place), test)
            for pattern, test in self._members(schema, "patternProperties", place).items()
        ]
        others = self._whole(
            schema.get("additionalProperties", True), f"{place}/additionalProperties"
        )

        def test_member(name: str, value: Any) -> bool:
            tests = [test for matches, test in patterned if matches(name)]
            tests += [named[name]] if name in named else []
            return all(test(value) for test in tests) if tests else others(value)

        if TYPES["object"] & schema.keys() or patterned:
            yield lambda value: all(test_member(name, member) for name, member in value.items())
        if "propertyNames" in schema:
            names = self._whole(schema["propertyNames"], f"{place}/propertyNames")
            yield lambda value: all(map(names, value))

    def _requiring(self, names: list[str]) -> Test:
        def test(value: dict[str, Any]) -> bool:
            self._allowance.spend(len(names))
            return all(name in value for name in names)

        return test

    def _members(self, schema: dict[str, Any], keyword: str, place: str) -> dict[str, Test]:
        given = schema.get(keyword, {})
        if not isinstance(given, dict):
            raise SchemaError(place, keyword, "wanted an object")
        return {name: self._whole(one, f"{place}/{keyword}/{name}") for name, one in given.items()}


def _type_test(types: list[str]) -> Test:
    def test(value: Any) -> bool:
        kind = type_of(value)
        is_whole = kind == "number" and "integer" in types and value == int(value)
        return kind in types or is_whole

    return test


def _bound_test(keyword: str, bound: Any) -> Test:
    if keyword == "multipleOf":
        factor = Fraction(str(bound))
        return lambda value: (Fraction(str(value)) / factor).denominator == 1
    tests: dict[str, Test] = {
        "minimum": lambda value: value >= bound,
        "maximum": lambda value: value <= bound,
        "exclusiveMinimum": lambda value: value > bound,
        "exclusiveMaximum": lambda value: value < bound,
    }
    return tests[keyword]


def _length_tests(schema: dict[str, Any], minimum: str, maximum: str, place: str) -> Iterable[Test]:
    low, high = count_of(schema, minimum, place), count_of(schema, maximum, place)
    if low is not None:
        yield lambda value: len(value) >= low
    if high is not None:
        yield lambda value: len(value) <= high


def _has_format(value: str, name: str) -> bool:
    if len(value) > _LONGEST_FORMATTED or not _shape(name).accepts(value.encode()):
        return False
    try:
        _READERS.get(name, str)(value.upper())
    except ValueError:
        return False
    return True


@cache
def _shape(name: str) -> Automaton:
    return build(regex(_SHAPES[name]))


def _size(value: Any) -> int:
    """Return the number of values within a value, plus an eighth of its characters."""
    if isinstance(value, str):
        return 1 + len(value) // 8
    if isinstance(value, dict):
        return 1 + sum(1 + len(name) // 8 + _size(member) for name, member in value.items())
    return 1 + sum(map(_size, value)) if isinstance(value, list) else 1

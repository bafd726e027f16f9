# SPDX-License-Identifier: Apache-2.0
"""Constants are checked against their schema with the same results as jsonschema."""

import random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from vllm.diffusion.guided.allowance import Allowance, OutOfWorkError
from vllm.diffusion.guided.json_values import ValueCheck, key_of
from vllm.diffusion.guided.schema_keywords import SchemaError

NAMES = "abcx"
COUNTS = tuple(
    f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Properties")
)
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
INNER = ("items", "contains", "additionalProperties", "propertyNames", "not")
TYPES: list[Any] = [
    *("integer", "number", "string", "array", "object", "null", "boolean"),
    *(["string", "integer"], ["number", "null"]),
]


def value(draw: random.Random, depth: int = 2) -> Any:
    kind = draw.randrange(6 if depth else 4)
    if kind == 0:
        return draw.randrange(-3, 6)
    if kind == 1:
        return draw.choice([0.5, 1.0, 2.5, -1.5])
    if kind == 2:
        return draw.choice(["", "a", "ab", "abc", "é", "xyz", "b"])
    if kind == 3:
        return draw.choice([True, False, None])
    if kind == 4:
        return [value(draw, depth - 1) for _ in range(draw.randrange(4))]
    return {draw.choice(NAMES): value(draw, depth - 1) for _ in range(draw.randrange(4))}


def schema(draw: random.Random, depth: int = 2) -> Any:
    if depth < 0 or draw.random() < 0.08:
        return draw.choice([True, False])
    names = (*COUNTS, *BOUNDS, *INNER, "type", "multipleOf", "pattern", "prefixItems", "required")
    names += ("uniqueItems", "properties", "patternProperties", "anyOf", "oneOf", "allOf", "enum")
    return {name: given(draw, name, depth) for name in draw.sample(names, draw.randrange(1, 4))}


def given(draw: random.Random, keyword: str, depth: int) -> Any:
    if keyword in COUNTS:
        return draw.randrange(4)
    if keyword in INNER:
        return schema(draw, depth - 1)
    if keyword in ("properties", "patternProperties"):
        names = NAMES if keyword == "properties" else ("a", "^b", "x$", ".")
        return {draw.choice(names): schema(draw, depth - 1) for _ in range(draw.randrange(3))}
    if keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        return [schema(draw, depth - 1) for _ in range(draw.randrange(1, 4))]
    plain: dict[str, Any] = {
        "type": TYPES,
        "multipleOf": [1, 2, 0.5, 1.5],
        "pattern": ["a", "^a", "b$", "^[a-c]+$", "x|y", "é"],
        "uniqueItems": [True, False],
    }
    if keyword == "required":
        return draw.sample(NAMES, draw.randrange(3))
    if keyword == "enum":
        return [value(draw, 1) for _ in range(3)]
    return draw.choice(plain.get(keyword, [-1, 0, 2, 2.5]))


@pytest.mark.parametrize("seed", range(4))
def test_values_are_those_that_jsonschema_allows(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        drawn = schema(draw)
        check, oracle = ValueCheck(drawn, "", Allowance()), Draft202012Validator(drawn)
        for _ in range(6):
            tried = value(draw)
            assert check.allows(tried) == oracle.is_valid(tried), (drawn, tried)


def test_equal_values_have_one_key() -> None:
    assert key_of(1) == key_of(1.0) != key_of(True)
    assert key_of({"a": [1, {}], "b": 0}) == key_of({"b": 0.0, "a": [1.0, {}]})
    assert key_of([]) != key_of({})
    assert key_of(["a"]) != key_of("a")


def test_what_is_wrong_is_found_before_any_value_is_seen() -> None:
    """Errors are found even in parts of a schema that no value reaches."""
    for wrong, place in (
        ({"items": {"items": {"pattern": "("}}}, "/items/items: pattern"),
        ({"items": {"anyOf": [True, {"minimum": "1"}]}}, "/items/anyOf/1: minimum"),
        ({"items": {"properties": {"a": {"$ref": "#"}}}}, r"/items/properties/a: \$ref"),
        ({"items": {"multipleOf": 0}}, "/items: multipleOf"),
        ({"items": 5}, "/items: schema"),
    ):
        with pytest.raises(SchemaError, match=place):
            ValueCheck(wrong, "", Allowance())


def test_checks_are_bounded_together() -> None:
    check = ValueCheck({"items": {"allOf": [{"minimum": 0}] * 100}}, "", Allowance(20_000))
    assert check.allows([1] * 20)
    with pytest.raises(OutOfWorkError):
        check.allows([1] * 2000)

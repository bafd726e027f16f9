# SPDX-License-Identifier: Apache-2.0
"""Formats become automata over tokens, and unsupported formats are refused by name."""

import asyncio
import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.guided.support import TOKENS, bytes_of, language_of
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.allowance import TooLargeError
from vllm.diffusion.guided.automaton import Automaton, build
from vllm.diffusion.guided.guides import (
    MAX_KEPT,
    Guide,
    Guides,
    Spec,
    forced,
    requested_spec,
    spec_of,
    spec_of_format,
)
from vllm.diffusion.guided.json_schema import any_object, from_schema
from vllm.diffusion.guided.language import Ends, Language, over_tokens
from vllm.diffusion.guided.regex import UnsupportedPatternError, regex
from vllm.diffusion.guided.schema_keywords import FORMATS, SchemaError
from vllm.diffusion.guided.vocabulary import Vocabulary

BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [None], 257)
FORMAT_CHECKER = Draft202012Validator.FORMAT_CHECKER


def walks(automaton: Automaton, count: int, seed: int = 0) -> Iterator[str]:
    """Yield random texts of a language, none of them much longer than necessary."""
    draw = random.Random(seed)
    room = over_tokens(automaton, BYTES, Ends(256)).room[:-1]
    dead = automaton.num_states
    inverse = [np.flatnonzero(automaton.classes == k) for k in range(automaton.table.shape[1])]
    for _ in range(count):
        state, data, left = 0, bytearray(), int(room[0]) + draw.randrange(60)
        while not (automaton.accepting[state] and (draw.random() < 0.2 or left <= 0)):
            row = automaton.table[state]
            kinds = [k for k in range(len(row)) if row[k] != dead]
            if not kinds:
                break
            near = [k for k in kinds if room[row[k]] < left]
            kind = draw.choice(near or [min(kinds, key=lambda k: room[row[k]])])
            data.append(int(draw.choice(inverse[kind])))
            state, left = int(row[kind]), left - 1
        yield data.decode()


SCHEMAS: dict[str, Any] = {
    "bounds": {"type": "integer", "minimum": -17, "exclusiveMaximum": 2050},
    "open below": {"type": "integer", "maximum": -5},
    "open above": {"type": "integer", "exclusiveMinimum": 99},
    "fractions": {"type": "number", "minimum": -1.25, "exclusiveMaximum": 3.5},
    "above zero": {"type": "number", "exclusiveMinimum": 0},
    "below zero": {"type": "number", "exclusiveMaximum": 0, "minimum": -3},
    "plain numbers": {"type": "number"},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": -30, "maximum": 100},
    "all multiples": {"type": "integer", "multipleOf": 12},
    "multiples of a number": {"type": "number", "multipleOf": 5, "minimum": 0},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
    "search": {"type": "string", "pattern": 'a"b|\\\\c'},
    "negated": {"type": "string", "pattern": "^[^a-z\\d]{3}$"},
    "options": {"enum": ["x", 3, None, {"a": [1, 2]}, "é\n"]},
    "options of a type": {"type": "integer", "enum": [1, "2", 3.5, 7, 30], "maximum": 9},
    "constant": {"const": [True, 'q"t']},
    "optional": {
        "type": "object",
        "properties": {k: {"type": "integer"} for k in "abcd"},
        "required": ["c"],
        "additionalProperties": False,
    },
    "all optional": {"type": "object", "properties": {k: {"type": "null"} for k in "abc"}},
    "required without schema": {"type": "object", "required": ["z"]},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "string"}, {"type": "integer"}],
        "items": {"type": "null"},
        "minItems": 1,
        "maxItems": 4,
    },
    "closed tuple": {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
    "several types": {"type": ["string", "null", "integer"], "maxLength": 3, "minimum": 5},
    "any of": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"const": "k"}}]},
    "one of": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": t}}, "required": ["t"]} for t in "pq"
        ]
    },
    "references": {
        "$defs": {"p": {"type": "object", "properties": {"x": {"type": "integer"}}}},
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/p"}, "q": {"allOf": [{"$ref": "#/$defs/p"}]}},
        "required": ["p", "q"],
    },
    "an encoded reference": {"$defs": {"a%b": {"type": "boolean"}}, "$ref": "#/$defs/a%25b"},
    "listed, of a format": {"enum": ["2020-01-01", "2020-01-02", "x"], "format": "date"},
    "members that only `required` names": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["b"],
        "additionalProperties": {"type": "boolean"},
    },
    "int32": {"type": "integer", "format": "int32", "minimum": 2**31 - 40},
    "anything": {"type": "object", "properties": {"v": {}}, "required": ["v"]},
    "any object": {"type": "object"},
    **{f"format {name}": {"type": "string", "format": name} for name in FORMATS},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_texts_of_a_schema_are_valid(schema: Any) -> None:
    check = Draft202012Validator(schema, format_checker=FORMAT_CHECKER)
    actual = set()
    for text in walks(build(from_schema(schema)), 60):
        check.validate(json.loads(text))
        actual.add(text)
    assert len(actual) > 1 or "const" in schema


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (SCHEMAS["bounds"], ["-17", "0", "2049", "9", "-1"]),
        (SCHEMAS["fractions"], ["-1.25", "0.50", "3.49", "0.005"]),
        (SCHEMAS["multiples"], ["-28", "0", "98"]),
        (SCHEMAS["all multiples"], ["0", "12", "-24", "1200"]),
        (SCHEMAS["optional"], ['{"c": 1}', '{"a": 1, "c": 2, "d": 3}', '{"b": 0, "c": -1}']),
        (SCHEMAS["all optional"], ["{}", '{"b": null}', '{"a": null, "c": null}']),
        (SCHEMAS["tuple"], ['["x"]', '["", 2]', '["é", 2, null, null]']),
        (SCHEMAS["search"], ['"a\\"b"', '"xa\\"by\\n"', '"\\\\c"']),
        ({"type": "string"}, ['"日本 \\t"', '""']),
    ],
)
def test_a_schema_leaves_what_it_should(schema: Any, texts: list[str]) -> None:
    automaton = build(from_schema(schema))
    assert [text for text in texts if not accepts(automaton, text.encode())] == []


@pytest.mark.parametrize("seed", range(8))
def test_any_object_is_json(seed: int) -> None:
    for text in walks(build(any_object()), 5, seed):
        assert isinstance(json.loads(text), dict)


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown keyword": ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
    "not": ({"not": {"type": "null"}}, "not"),
    "if": ({"if": {}, "then": {}}, "if"),
    "patternProperties": ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {}}, "contains"),
    "minProperties": ({"type": "object", "minProperties": 1}, "minProperties"),
    "maxProperties": ({"type": "object", "maxProperties": 1}, "maxProperties"),
    "format": ({"type": "string", "format": "regex"}, "format"),
    "format and pattern": ({"type": "string", "format": "date", "pattern": "1"}, "format"),
    "pattern and length": ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "assert"),
    "back reference": ({"type": "string", "pattern": "(a)\\1"}, "groupref"),
    "multiples of fractions": ({"type": "number", "multipleOf": 0.1}, "multipleOf"),
    "many multiples": (
        {"type": "integer", "multipleOf": 2, "minimum": 5, "maximum": 10**6},
        "multipleOf",
    ),
    "recursion": (
        {"$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        "contains itself",
    ),
    "dangling": ({"$ref": "#/$defs/n"}, "nowhere"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, "allOf"),
    "anyOf beside": ({"anyOf": [{"type": "integer"}], "minimum": 1}, "minimum"),
    "type": ({"type": "text"}, "type"),
    "no type": ({"type": []}, "type"),
    "type of a type": ({"type": [{}]}, "type"),
    "required": ({"type": "object", "required": [1]}, "required"),
    "additionalProperties": ({"properties": {}, "additionalProperties": 5}, "additionalProperties"),
    "pattern that is none": ({"type": "string", "pattern": 5}, "pattern"),
    "format that is none": ({"type": "string", "format": ["date"]}, "format"),
    "format of a number": ({"type": "number", "format": "int32"}, "format"),
    "count": ({"type": "array", "minItems": "abc"}, "minItems"),
    "infinite count": ({"type": "array", "minItems": float("inf")}, "minItems"),
    "no bound": ({"type": "integer", "minimum": None}, "minimum"),
    "infinite bound": ({"type": "number", "maximum": float("inf")}, "maximum"),
    "long bound": ({"type": "integer", "maximum": 10**400}, "at most 27 digits"),
    "listed beside a reference": ({"enum": [1], "items": {"$ref": "#"}}, "$ref"),
    "listed beside anyOf": ({"const": 1, "anyOf": [{}]}, "anyOf"),
    "listed beside no pattern": ({"enum": ["a"], "pattern": "("}, "enum"),
    **{
        f"{keyword} {place} to {address[:4]}": ({**outer, "items": {keyword: address}}, keyword)
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef")
        for address in ("file:///etc/hostname.json#/a", "http://127.0.0.1:9/x.json", "other.json")
        for place, outer in (("inside", {"type": "array"}), ("beside enum", {"enum": [[1]]}))
    },
    "a file as $schema": ({"enum": [1], "$schema": "file:///etc/hostname.json"}, "$schema"),
    "a file as $id": ({"type": "null", "$id": "FILE:///etc/hostname.json"}, "$id"),
    "unknown keyword beside enum": ({"enum": [[1]], "items": {"if": {}}}, "/items: if"),
    "inner $id": ({"items": {"$id": "http://x/y", "type": "null"}}, "$id"),
    "inside": ({"properties": {"a/b": {"type": "array", "contains": 1}}}, "/properties/a~1b"),
}


@pytest.mark.parametrize(("schema", "name"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, name: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(name)):
        from_schema(schema)


CHECKED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "types": ({"type": ["integer", "string"]}, [1, 1.0, 1.5, "a", True, None, [], {}]),
    "numbers": ({"minimum": 2, "exclusiveMaximum": 9}, [1, 2, 8.9, 9, "1", True]),
    "multiples": ({"multipleOf": 0.5}, [0.3, 1.5, 7, 10**40, "a"]),
    "lengths": ({"minLength": 2, "maxLength": 3}, ["", "é", "日本", "abc", "abcd", 5]),
    "patterns": ({"pattern": "^a+b|c$"}, ["aab", "xc", "cx", "", "日c", 4]),
    "arrays": (
        {"prefixItems": [{"type": "null"}], "items": {"type": "integer"}, "maxItems": 3},
        [[], [None], [None, 1], [None, "a"], [1], [None, 1, 2, 3], {}],
    ),
    "unique": ({"uniqueItems": True}, [[1, 2], [1, 1.0], [1, True], [{"a": 1}, {"a": 1}], "aa"]),
    "contains": ({"items": {"contains": {"const": 1}}}, [[[2, 1]], [[2]], [[]], [1]]),
    "objects": (
        {
            "properties": {"a": {"type": "integer"}, "b": {}},
            "required": ["a"],
            "additionalProperties": {"type": "null"},
            "maxProperties": 2,
        },
        [{}, {"a": 1}, {"a": "1"}, {"b": 1, "a": 2}, {"a": 1, "c": None}, {"a": 1, "c": 2}, []],
    ),
    "patterns of names": (
        {"items": {"patternProperties": {"^x": {"type": "null"}}, "additionalProperties": False}},
        [[{"x": None}], [{"x": 1}], [{"y": None}], [{}]],
    ),
    "names": ({"items": {"propertyNames": {"maxLength": 1}}}, [[{"a": 1}], [{"ab": 1}], ["ab"]]),
    "combinations": (
        {"items": {"anyOf": [{"const": 1}, {"not": {"type": "number"}}], "allOf": [{}, True]}},
        [[1], [2], ["a"], [1, None]],
    ),
    "one of": ({"items": {"oneOf": [{"minimum": 2}, {"maximum": 4}]}}, [[1], [3], [5], ["a"]]),
    "dates": ({"format": "date"}, ["2020-02-29", "2021-02-29", "20200101", "x", 1]),
    "addresses": ({"format": "ipv6"}, ["::1", "1::2::3", "z"]),
    "emails": ({"format": "email"}, ["a@b", "ab", 3]),
}


@pytest.mark.parametrize(("schema", "values"), CHECKED.values(), ids=CHECKED)
def test_constants_are_those_that_the_keywords_beside_them_allow(
    schema: dict[str, Any], values: list[Any]
) -> None:
    oracle = Draft202012Validator(schema, format_checker=FORMAT_CHECKER)
    automaton = build(from_schema({**schema, "enum": values}))
    actual = [value for value in values if accepts(automaton, in_json(value))]
    assert actual == [value for value in values if oracle.is_valid(value)]
    assert 0 < len(actual) < len(values)


@pytest.mark.parametrize("where", ["pattern", "patternProperties", "items"])
def test_patterns_are_matched_without_backtracking(where: str) -> None:
    """A backtracking matcher would need more time than the age of the universe."""
    text, evil = "a" * 3000 + "!", "^(a+)+$"
    schemas: dict[str, tuple[Any, dict[str, Any]]] = {
        "pattern": (text, {"pattern": evil}),
        "items": ([text], {"items": {"pattern": evil}}),
        "patternProperties": ([{text: 1}], {"items": {"patternProperties": {evil: {}}}}),
    }
    value, schema = schemas[where]
    automaton = build(from_schema({"enum": [value, 1], **schema}))
    is_allowed = where == "patternProperties"
    assert accepts(automaton, in_json(value)) is is_allowed


def in_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def accepts(automaton: Automaton, data: bytes) -> bool:
    state = 0
    for byte in data:
        state = int(automaton.table[state, automaton.classes[byte]])
    return bool(automaton.accepting[state])


@pytest.mark.parametrize(
    "pattern",
    [r"a*b+?c{2,3}", r"(x|yz)?[^\W\d]", r"\d{1,2}:\d\d", r"é|[à-ü]+", r"^ab$", r"a.c", r"[^b]\S\s"],
)
def test_a_regex_matches_as_pythons(pattern: str) -> None:
    automaton = build(regex(pattern))
    for text in walks(automaton, 40):
        assert re.fullmatch(pattern, text), text
    letters = "abcxyz01:é \n"
    for length in range(4):
        for letter in itertools.product(letters, repeat=length):
            text = "".join(letter)
            wanted = re.fullmatch(pattern, text) is not None
            assert accepts(automaton, text.encode()) <= wanted
            if text.isascii():
                assert accepts(automaton, text.encode()) == wanted, text


@pytest.mark.parametrize("pattern", ["(", "(?i)a", "a\\b", "(?<=a)b", "a++", "(^a|b)c"])
def test_what_is_not_regular_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPatternError):
        regex(pattern)


BOMBS = {
    "optional parts": "(a?b?c?d?){1000}",
    "inner repetitions": "((a{2,30}b?){2,30}c?){2,30}",
    "subsets": "(a|b)*a(a|b){20}",
    "parts": "((a{2,500}b){2,500}c){2,500}",
    "many sets": "".join(f"[^\\d{chr(0x4E00 + index)}]" for index in range(3000)),
    "many digits": "a{" + "1" * 5000 + "}",
    "length": "a" * 20_001,
}


@pytest.mark.parametrize("pattern", BOMBS.values(), ids=BOMBS)
def test_patterns_that_cost_too_much_are_refused(pattern: str) -> None:
    with pytest.raises((TooLargeError, UnsupportedPatternError), match=r"more than|wanted|digits"):
        build(regex(pattern))


def test_schemas_that_cost_too_much_are_refused() -> None:
    names = [f"p{index}" for index in range(3000)]
    bombs: list[Any] = [
        {"properties": {name: {} for name in names}},
        {
            "$defs": {"e": {"enum": ["a" * 50_000]}},
            "properties": {name: {"$ref": "#/$defs/e"} for name in names},
            "required": names,
        },
        {"$defs": _doubled(60), "$ref": "#/$defs/d60"},
        {"enum": [[1] * 20_000], "items": {"allOf": [{"not": {"const": 2}}] * 20_000}},
        {"oneOf": [{"const": index} for index in range(4000)]},
    ]
    for schema in bombs:
        with pytest.raises(
            (TooLargeError, SchemaError), match=r"wanted at most|it takes more than"
        ):
            build(from_schema(schema))


def _doubled(depth: int) -> dict[str, Any]:
    """Return references of which each contains the next one twice."""
    actual: dict[str, Any] = {"d0": {"type": "null"}}
    for level in range(1, depth + 1):
        inner = {"$ref": f"#/$defs/d{level - 1}"}
        actual[f"d{level}"] = {"type": "array", "prefixItems": [inner, inner], "items": False}
    return actual


def test_languages_have_limits_with_numbers() -> None:
    with pytest.raises(
        TooLargeError, match=r"^repetition \{20\}: it has more than 20000 states; wanted"
    ):
        build(regex("(a|b)*a(a|b){20}"))
    with pytest.raises(TooLargeError, match=r"it has \d+ parts; wanted at most 200000"):
        build(regex("((a{1,500}){1,500}){1,500}"))
    schema = {"properties": {"note": {"type": "string", "maxLength": 9000}}, "required": ["note"]}
    with pytest.raises(TooLargeError, match=r"^/properties/note: maxLength: given 9000: it has"):
        build(from_schema(schema))


@pytest.mark.parametrize(
    ("schema", "unit", "minimum", "maximum"),
    [
        ({"type": "string", "maxLength": 2000}, "é", 0, 2000),
        ({"type": "string", "minLength": 1500, "maxLength": 2000}, "x", 1500, 2000),
        ({"type": "string", "pattern": "^[a-z日]{2,1000}$"}, "日", 2, 1000),
        ({"type": "array", "items": {"const": 7}, "maxItems": 2000}, "7, ", 0, 2000),
    ],
)
def test_long_repetitions_are_counted(schema: Any, unit: str, minimum: int, maximum: int) -> None:
    automaton = build(from_schema(schema))
    for count in {max(minimum - 1, 0), minimum, maximum, maximum + 1}:
        inner = (unit * count).removesuffix(", ")
        text = f"[{inner}]" if schema["type"] == "array" else f'"{inner}"'
        assert accepts(automaton, text.encode()) == (minimum <= count <= maximum), count


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        ("(a?){9000}", "a{0,9000}"),
        ("((a{1,3}){0,2}){2,3}", "a{0,18}"),
        ("(a{1,}){3}", "a{3,}"),
        ("(a{0}){5}b", "b"),
        ("(a*){0}b", "b"),
        ("((ab)*){2,3}", "(ab)*"),
        ("(a{2}){1,3}", "aa(aa(aa)?)?"),
    ],
)
def test_repetitions_of_repetitions_are_one(pattern: str, same: str) -> None:
    actual, wanted = build(regex(pattern)), build(regex(same))
    np.testing.assert_array_equal(actual.table, wanted.table)
    np.testing.assert_array_equal(actual.accepting, wanted.accepting)


@pytest.mark.parametrize("pattern", ["(a|bc)*1?", "a(b|c)+", "abcabc|1"])
def test_a_language_has_every_spelling_in_tokens(pattern: str) -> None:
    language = language_of(regex(pattern))
    room: list[int] = []
    for length in range(5):
        for ids in itertools.product(range(len(TOKENS)), repeat=length):
            state = 0
            for token in ids:
                state = language.advance(state, token)
            text = bytes_of(ids)
            is_whole = text is not None and re.fullmatch(pattern, text.decode()) is not None
            accepted = state < language.num_states and language.room[state] == 0
            assert accepted == is_whole, ids
            if is_whole and all(token < 7 for token in ids):
                room.append(length)
    assert language.least_tokens == min(room)


def test_a_language_crosses_processes() -> None:
    language = language_of(regex("(a|bc)*1?"))
    again = Language.unpacked(language.packed())
    for name in ("class_of_token", "set_members", "edge_sets", "edge_targets", "room"):
        np.testing.assert_array_equal(getattr(again, name), getattr(language, name))


def test_the_forced_beginning_is_found() -> None:
    automaton = build(from_schema({"type": "object", "properties": {"é": {}}, "required": ["é"]}))
    assert forced(automaton).decode() == '{"é": '
    assert forced(build(regex("a(bc)?"))) == b"a"


def test_languages_are_compiled_once_and_refusals_too() -> None:
    loads = []

    def load() -> Vocabulary:
        loads.append(1)
        return Vocabulary(TOKENS, len(TOKENS))

    guides = Guides(load, Ends(8, (9,)), lambda text: [TOKENS.index(c.encode()) for c in text])
    spec = spec_of({"regex": "abc1?"})
    assert spec is not None
    assert guides.guide(spec) is guides.guide(spec)
    assert guides.guide(spec).prefix == (0, 1)
    assert guides.guide(spec).least_tokens == 1
    wrong: list[dict[str, Any]] = [{"regex": "zz"}, {"regex": "("}, {"json": {"not": {}}}]
    for field in wrong:
        refused = spec_of(field)
        assert refused is not None
        errors = []
        for _ in range(2):
            with pytest.raises(InvalidParameterError) as error:
                guides.guide(refused)
            errors.append(error.value)
        assert errors[0] is errors[1]
    assert loads == [1]


def letters_guides() -> Guides:
    vocabulary = Vocabulary(TOKENS, len(TOKENS))
    return Guides(lambda: vocabulary, Ends(8, (9,)), lambda text: [])


def spec(pattern: str) -> Spec:
    actual = spec_of({"regex": pattern})
    assert actual is not None
    return actual


def test_no_format_waits_for_a_large_one_and_leaving_ends_the_work() -> None:
    """Without a limit on its work, the first format would take hours."""
    guides = letters_guides()

    async def ask() -> list[int]:
        large = asyncio.create_task(guides.compiled(spec("(a?b?c?1?){3000}")))
        small = [await guides.compiled(spec(f"a{{{count}}}")) for count in (5, 6)]
        assert not large.done()
        large.cancel()
        with pytest.raises(asyncio.CancelledError):
            await large
        other = await guides.compiled(spec("(ab?c?){300}"))  # in the thread for large formats
        return [guide.least_tokens for guide in (*small, other)]

    with (
        mock.patch("vllm.diffusion.guided.guides.MAX_WORK", 10**15),
        mock.patch("vllm.diffusion.guided.allowance.MAX_SECONDS", 10**6),
    ):
        assert asyncio.run(asyncio.wait_for(ask(), 300)) == [5, 6, 300]


def test_one_of_several_who_wait_may_leave() -> None:
    guides, pattern = letters_guides(), "(ab?c?){300}"

    async def ask() -> Guide:
        first, second = (asyncio.create_task(guides.compiled(spec(pattern))) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    actual = asyncio.run(asyncio.wait_for(ask(), 300))
    assert guides.guide(spec(pattern)) is actual


def test_a_language_that_is_in_use_is_never_compiled_again() -> None:
    guides = letters_guides()
    held = guides.guide(spec("ab"))
    for count in range(MAX_KEPT + 1):
        guides.guide(spec(f"a{{{count // 16}}}b{{{count % 16}}}c"))
    assert guides.guide(spec("ab")) is held


def test_a_refusal_quotes_what_was_given_in_one_line() -> None:
    guides = letters_guides()
    with pytest.raises(InvalidParameterError, match=r"regex: given '\[a-'; it is no regular"):
        guides.guide(spec("[a-"))
    schema = {"properties": {"a\nb": {"uniqueItems": 5}}, "required": ["a\nb"]}
    refused = spec_of({"json": schema})
    assert refused is not None
    with pytest.raises(InvalidParameterError) as error:
        guides.guide(refused)
    assert str(error.value).isprintable()
    with pytest.raises(InvalidParameterError, match="more than 200000 characters") as error:
        spec_of({"json": {"enum": ["a" * 300, *range(10**6)]}})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"json": {}, "regex": "a"},
        {"grammar": "root ::= a"},
        {"json": {}, "whitespace_pattern": " *"},
        {"structural_tag": "{}"},
        {"choice": []},
        {"choice": "ab"},
        {"regex": 1},
        {"json": "{"},
        {"jsn": {}},
        {"json": {"const": float("nan")}},
        {"choice": ["\ud800"]},
    ],
)
def test_structured_outputs_are_one_thing_that_is_known(given: Any) -> None:
    with pytest.raises(InvalidParameterError, match="structured_outputs"):
        spec_of(given)


def test_response_formats() -> None:
    schema = {"type": "integer"}
    wrapped = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    spec = spec_of_format(wrapped)
    assert spec is not None
    assert (spec.kind, json.loads(spec.value)) == ("json", schema)
    assert spec_of_format({"type": "text"}) is None
    assert spec_of_format(None) is None
    for wrong in (
        {"type": "xml"},
        {"type": "json_schema"},
        "json",
        {"type": "structural_tag"},
        {"type": "json_object", "schema": schema},  # a form of other servers; must not be ignored
        {"type": "json_schema", "json_schema": {"schema": schema, "allow": "anything"}},
    ):
        with pytest.raises(InvalidParameterError, match="response_format"):
            spec_of_format(wrong)
    with pytest.raises(InvalidParameterError, match="either it or structured_outputs"):
        requested_spec(wrapped, {"regex": "a"})

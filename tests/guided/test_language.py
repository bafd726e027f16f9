# SPDX-License-Identifier: Apache-2.0
"""What is asked for becomes an automaton over tokens; what cannot be had is refused by name."""

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from tests.guided.support import TOKENS, bytes_of, language_of
from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.automaton import Automaton, TooLargeError, build
from vllm.diffusion.guided.guides import Guides, asked_spec, forced, spec_of, spec_of_format
from vllm.diffusion.guided.json_schema import FORMATS, SchemaError, any_object, from_schema
from vllm.diffusion.guided.language import Ends, Language, over_tokens
from vllm.diffusion.guided.regex import UnsupportedPatternError, regex
from vllm.diffusion.guided.vocabulary import Vocabulary

BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [None], 257)
FORMAT_CHECKER = Draft202012Validator.FORMAT_CHECKER


def walks(automaton: Automaton, count: int, seed: int = 0) -> Iterator[str]:
    """Random texts of a language, none much longer than it must be."""
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
    found = set()
    for text in walks(build(from_schema(schema)), 60):
        check.validate(json.loads(text))
        found.add(text)
    assert len(found) > 1 or "const" in schema


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
    "inner $id": ({"items": {"$id": "http://x/y", "type": "null"}}, "$id"),
    "inside": ({"properties": {"a/b": {"type": "array", "contains": 1}}}, "/properties/a~1b"),
}


@pytest.mark.parametrize(("schema", "name"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, name: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(name)):
        from_schema(schema)


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


def test_languages_have_limits_with_numbers() -> None:
    with pytest.raises(TooLargeError, match=r"more than 16000 states; wanted"):
        build(regex("(a|b)*a(a|b){20}"))
    with pytest.raises(TooLargeError, match=r"it has \d+ parts; wanted at most 200000"):
        build(regex("((a{1,500}){1,500}){1,500}"))


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
        {"type": "json_object", "schema": schema},  # as others write it; not to be ignored
        {"type": "json_schema", "json_schema": {"schema": schema, "allow": "anything"}},
    ):
        with pytest.raises(InvalidParameterError, match="response_format"):
            spec_of_format(wrong)
    with pytest.raises(InvalidParameterError, match="either it or structured_outputs"):
        asked_spec(wrapped, {"regex": "a"})

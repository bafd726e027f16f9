# SPDX-License-Identifier: Apache-2.0
"""The bodies of `POST /v1/decisions`: OpenAI's, with `input`, and System One's, with `state`."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, create_model

from vllm.diffusion.api.decisions.faults import (
    BodyFault,
    check_list,
    check_object,
    check_one_of,
    check_text,
    key_of,
    shown,
    wanted,
)
from vllm.diffusion.api.decisions.inputs import text_of_input, text_of_parts
from vllm.diffusion.api.likelihood.sheets import MAX_OPTIONS, SHORT
from vllm.diffusion.api.likelihood.typed_decisions import FORMAT, PASSES
from vllm.diffusion.api.schema import described
from vllm.diffusion.request.fields import BY_NAME, by_spelling, checked
from vllm.diffusion.request.values import Field as Parameter
from vllm.entrypoints.openai.decisions.question_types import (
    QUESTION_TYPES,
    Option,
    Question,
)
from vllm.entrypoints.openai.decisions.strategies import state_text

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_QUESTIONS = 400
MAX_LEVELS = 10
MAX_ORDERS = 4
MAX_SALT = 1024
MAX_IDENTIFIER = 128

PARAMETERS: tuple[Parameter, ...] = (
    PASSES,
    Parameter(
        "orders",
        int,
        "number of orders of options and questions in which a call is read; the probabilities are "
        "averaged",
        default=1,
        minimum=1,
        maximum=MAX_ORDERS,
    ),
    Parameter(
        "joint",
        bool,
        "whether all questions share a sequence and see each other; without it each question has a "
        "sequence of its own",
        default_text="the server's decisions_joint; false for block-causal families",
    ),
    Parameter(
        "calibrated",
        bool,
        "whether the server's calibration applies, if it has one",
        default=True,
    ),
    replace(FORMAT, default=SHORT),
    BY_NAME["timeout_s"],
    BY_NAME["priority"],
)
_BY_SPELLING = by_spelling(PARAMETERS)
_BOOLEANS = tuple(name for name, field in _BY_SPELLING.items() if field.kind is bool)
_SHARED = ("model", "questions", "cache_salt", *_BY_SPELLING)
_OF_OPENAI = ("input", "safety_identifier", "prompt_cache_key", "prompt_cache_options")
_MEDIA = ("images", "audio", "videos")
_OF_SYSTEM_ONE = ("state", "instructions", *_MEDIA, "chat_template_kwargs", "request_id")


class DecisionsFields(BaseModel):
    """Fields of the body other than the parameters; `read_body` checks them."""

    model_config = ConfigDict(extra="allow")

    model: Any = Field(None, description="name of the served model")
    input: Any = Field(
        None,
        description="OpenAI's body: a string, or messages, calls of functions and their outputs",
    )
    state: Any = Field(None, description="System One's body: what the questions are about")
    questions: Any = Field(
        None,
        description="1 to 400 questions: with input, a list of predicate, choice and score; with "
        "state, an object of noul, choice and score by id",
        json_schema_extra={"anyOf": [{"type": "array"}, {"type": "object"}]},
    )
    instructions: Any = Field(None, description="System One's body: text before the questions")
    cache_salt: Any = Field(
        None, description="separates cached keys and values: it is a part of their hash"
    )


DecisionsBody = create_model(
    "DecisionsBody",
    __base__=DecisionsFields,
    __doc__="Body of POST /v1/decisions.",
    **described(PARAMETERS),
)


@dataclass(frozen=True)
class BodyQuestion:
    """A question of a body.

    Attributes:
        path: path of the question in the body.
        name: its name, or its id in System One's body; None if it has none.
        kind: predicate, choice or score.
        options_field: name of the field with its options.
        values: the values of its options in an answer: choices, or labels of levels.
        question: the question as the model reads it. It has no labels if there are more options
            than letters.
    """

    path: str
    name: str | None
    kind: str
    options_field: str
    values: tuple[Any, ...]
    question: Question


class DecisionCall(NamedTuple):
    """A body that has been read.

    Attributes:
        is_openai: whether the body is OpenAI's.
        state: the text that the questions are about.
        instructions: text before the questions, in System One's body.
        questions: the questions, in order.
        values: the parameters of `PARAMETERS` that are given.
        cache_salt: part of the hash of pages, if given.
        template_kwargs: arguments of the chat template, in System One's body.
    """

    is_openai: bool
    state: str
    instructions: str | None
    questions: list[BodyQuestion]
    values: dict[str, Any]
    cache_salt: str | None
    template_kwargs: dict[str, Any] | None

    @property
    def state_field(self) -> str:
        return "input" if self.is_openai else "state"


def read_body(body: Mapping[str, Any]) -> DecisionCall:
    """Check a body and convert it to a call.

    Raises:
        InvalidParameterError: naming the field.
    """
    body = {name: value for name, value in body.items() if name != "input" or value is not None}
    has_input, has_state = "input" in body, "state" in body
    if has_input and has_state:
        raise BodyFault("input, state", "both given; wanted one")
    if not has_input and not has_state:
        raise BodyFault("input, state", "given nothing; wanted one")
    known = {*_SHARED, *(_OF_OPENAI if has_input else _OF_SYSTEM_ONE)}
    for name in body:
        if name not in known:
            raise BodyFault(key_of(name), "unknown parameter")
    if body.get("model") is not None:
        check_text("model", body["model"])
    values = _parameters(body)
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT):
        raise wanted("cache_salt", salt, f"1 to {MAX_SALT:,} characters")
    if has_input:
        _check_identifiers(body)
        state = text_of_input("input", body["input"])
        questions = _list_of_questions(body.get("questions"))
        return DecisionCall(True, state, None, questions, values, salt, None)
    instructions, kwargs = _system_one(body)
    questions = _questions_by_id(body.get("questions"))
    state = state_text(body["state"])
    return DecisionCall(False, state, instructions, questions, values, salt, kwargs)


def _parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given parameters, checked."""
    given = {name: body[name] for name in _BY_SPELLING if body.get(name) is not None}
    for name in _BOOLEANS:
        if name in given and not isinstance(given[name], bool):
            raise wanted(name, given[name], "true or false")
    return checked(given, _BY_SPELLING)


def _check_identifiers(body: Mapping[str, Any]) -> None:
    """Check the fields of OpenAI's body that have no effect here."""
    identifier = body.get("safety_identifier")
    if identifier is not None and len(check_text("safety_identifier", identifier)) > MAX_IDENTIFIER:
        text = f"given {len(identifier)} characters; wanted at most {MAX_IDENTIFIER}"
        raise BodyFault("safety_identifier", text)
    if body.get("prompt_cache_key") is not None:
        check_text("prompt_cache_key", body["prompt_cache_key"])
    if body.get("prompt_cache_options") is not None:
        path = "prompt_cache_options"
        options = check_object(path, body[path], (), ("mode", "ttl"))
        if options.get("mode") is not None:
            check_one_of(f"{path}.mode", options["mode"], ("implicit", "explicit"))
        if options.get("ttl") is not None:
            check_one_of(f"{path}.ttl", options["ttl"], ("30m",))


def _system_one(body: Mapping[str, Any]) -> tuple[str | None, dict[str, Any] | None]:
    """Check the further fields of System One's body; return instructions and template arguments."""
    for name in _MEDIA:
        if body.get(name) not in (None, []):
            raise BodyFault(name, f"given {shown(body[name])}; this model reads text only")
    if body.get("request_id") is not None:
        check_text("request_id", body["request_id"])
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None:
        if not isinstance(kwargs, dict):
            raise wanted("chat_template_kwargs", kwargs, "an object")
        if kwargs.get("enable_thinking"):
            given = shown(kwargs["enable_thinking"])
            text = f"given {given}; an answer is the first token of a reply, so wanted false"
            raise BodyFault("chat_template_kwargs.enable_thinking", text)
    instructions = body.get("instructions")
    if instructions is not None:
        check_text("instructions", instructions, "a string or nothing")
    return instructions, kwargs


def _list_of_questions(given: Any) -> list[BodyQuestion]:
    """Return the questions of OpenAI's body."""
    if not isinstance(given, list):
        raise wanted("questions", given, f"a list of 1 to {MAX_QUESTIONS}, as input is given")
    questions = check_list("questions", given, 1, MAX_QUESTIONS)
    return [_question(f"questions[{n}]", n, value) for n, value in enumerate(questions)]


def _question(path: str, number: int, value: Any) -> BodyQuestion:
    """Read a question of OpenAI's body."""
    if not isinstance(value, dict):
        raise wanted(path, value, "an object")
    kind = check_one_of(f"{path}.type", value.get("type"), ("predicate", "choice", "score"))
    own = {"predicate": (), "choice": ("choices",), "score": ("levels",)}[kind]
    check_object(path, value, ("type", "instructions", *own), ("name",))
    if "name" in value:
        check_text(f"{path}.name", value["name"], "a string or nothing")
    text = text_of_parts(f"{path}.instructions", value["instructions"])
    if kind == "predicate":
        options, values = [Option("yes"), Option("no")], (True, False)
    elif kind == "choice":
        options, values = _choices(f"{path}.choices", value["choices"])
    else:
        options, values = _levels(f"{path}.levels", value["levels"])
    question = _as_read(str(number), kind, text, options)
    return BodyQuestion(path, value.get("name"), kind, own[0] if own else "", values, question)


def _choices(path: str, given: Any) -> tuple[list[Option], tuple[Any, ...]]:
    """Return the options of a choice, shown as JSON, and their values."""
    options, values = [], dict[tuple[type, Any], None]()
    for number, choice in enumerate(check_list(path, given, 2, MAX_OPTIONS)):
        at = f"{path}[{number}]"
        check_object(at, choice, ("value",), ("description",))
        value = choice["value"]
        if not isinstance(value, str | bool):
            raise wanted(f"{at}.value", value, "a string, true or false")
        if (type(value), value) in values:
            raise BodyFault(f"{at}.value", f"{shown(value)} stands twice")
        values[type(value), value] = None
        text = json.dumps(value, ensure_ascii=False)
        options.append(Option(text, _description(at, choice)))
    return options, tuple(value for _, value in values)


def _levels(path: str, given: Any) -> tuple[list[Option], tuple[Any, ...]]:
    """Return the levels of a score, from the first to the last, and their labels."""
    options = []
    for number, level in enumerate(check_list(path, given, 2, MAX_LEVELS)):
        at = f"{path}[{number}]"
        check_object(at, level, ("label",), ("description",))
        label = check_text(f"{at}.label", level["label"])
        options.append(Option(label, _description(at, level)))
    return options, tuple(option.name for option in options)


def _description(path: str, value: Mapping[str, Any]) -> str | None:
    description = value.get("description")
    if description is not None:
        check_text(f"{path}.description", description, "a string or nothing")
    return description or None


def _as_read(name: str, kind: str, text: str, options: list[Option]) -> Question:
    question_type = QUESTION_TYPES[{"predicate": "noul"}.get(kind, kind)]
    has_labels = len(options) <= len(question_type.label_set)
    labels = question_type.label_set[: len(options)] if has_labels else ()
    return Question(name, question_type, text, tuple(options), labels)


def _questions_by_id(given: Any) -> list[BodyQuestion]:
    """Return the questions of System One's body."""
    if not isinstance(given, dict):
        raise wanted("questions", given, f"an object of 1 to {MAX_QUESTIONS}, as state is given")
    if not 1 <= len(given) <= MAX_QUESTIONS:
        raise BodyFault("questions", f"given {len(given)}; wanted 1 to {MAX_QUESTIONS}")
    return [_question_by_id(name, value) for name, value in given.items()]


def _question_by_id(name: str, value: Any) -> BodyQuestion:
    if not name:
        raise BodyFault("questions", 'given the id ""; wanted ids that are not empty')
    path = f"questions.{key_of(name)}"
    check_object(path, value, ("type",), ("instructions", "criteria"))
    kind = check_one_of(f"{path}.type", value["type"], ("noul", "choice", "score"))
    at, criteria = f"{path}.criteria", value.get("criteria")
    if kind == "noul":
        sides = {} if criteria is None else check_object(at, criteria, (), ("true", "false"))
        options = [_side("yes", sides.get("true")), _side("no", sides.get("false"))]
    elif kind == "choice":
        if not isinstance(criteria, dict):
            raise wanted(at, criteria, "an object of options with a description or null")
        if not 1 <= len(criteria) <= MAX_OPTIONS:
            raise BodyFault(at, f"given {len(criteria)}; wanted 1 to {MAX_OPTIONS}")
        options = [_side(option, text) for option, text in criteria.items()]
    else:
        levels = check_list(at, criteria, 2, MAX_LEVELS)
        options = [Option(str(level)) for level in levels]
    instructions = value.get("instructions")
    text = "" if instructions is None else str(instructions)
    values = tuple(option.name for option in options)
    if len(set(values)) < len(values):
        raise BodyFault(at, "a level stands twice; wanted each once")
    kind = {"noul": "predicate"}.get(kind, kind)
    return BodyQuestion(path, name, kind, "criteria", values, _as_read(name, kind, text, options))


def _side(name: str, description: Any) -> Option:
    return Option(name, None if description is None else str(description))


def refuse_openai_body(body: Mapping[str, Any]) -> None:
    """Refuse OpenAI's body on the route of System One's.

    Raises:
        BodyFault: naming `input`.
    """
    if "input" in body and "state" not in body:
        raise BodyFault("input", "unknown parameter; POST /v1/decisions takes OpenAI's body")

# SPDX-License-Identifier: Apache-2.0
"""Compilation of a requested format to a language over the model's tokens, with a cache."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.automaton import TooLargeError, build
from vllm.diffusion.guided.json_schema import SchemaError, any_object, from_schema
from vllm.diffusion.guided.language import EmptyLanguageError, Language, over_tokens
from vllm.diffusion.guided.regex import UnsupportedPatternError, regex
from vllm.diffusion.guided.syntax import either
from vllm.diffusion.guided.tool_grammar import Tools, calls
from vllm.diffusion.guided.vocabulary import Vocabulary, VocabularyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.diffusion.guided.automaton import Automaton
    from vllm.diffusion.guided.language import Ends
    from vllm.diffusion.guided.syntax import Node

STRUCTURED = "structured_outputs"
SPEC = "dllm_spec"  # key of extra_args under which our own routes hand on what is asked for
RESPONSE_FORMAT = "response_format"
MOST_KEPT = 256  # languages in a process
MOST_CHARACTERS = 200_000  # of what is asked for, as JSON

_KINDS = ("json", "regex", "choice", "json_object")
_OF_JSON_SCHEMA = {"name", "description", "schema", "json_schema", "strict"}
_WRITERS = (*_KINDS, "tools")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "grammar": (None,),
    "structural_tag": (None,),
    "whitespace_pattern": (None,),
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False, True),
}


@dataclass(frozen=True)
class Spec:
    """Requested format: `kind` is one of structured_outputs' fields, `value` its JSON."""

    kind: str
    value: str
    field: str = STRUCTURED


@dataclass(frozen=True)
class Guide:
    """A compiled language, as requests carry it.

    Attributes:
        language: result of `Language.packed`.
        least_tokens: number of tokens of the shortest answer.
        prefix: tokens with which every answer begins.
    """

    language: bytes
    least_tokens: int
    prefix: tuple[int, ...] = ()


def spec_of(given: Any) -> Spec | None:
    """Read upstream's `structured_outputs`, a map of its fields.

    Raises:
        InvalidParameterError: it asks for nothing, for two things, or for what cannot be had.
    """
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidParameterError(STRUCTURED, given, f"wanted one of {', '.join(_KINDS)}")
    for name, neutral in _NEUTRAL.items():
        if given.get(name) not in neutral:
            wanted = "wanted none: not supported"
            raise InvalidParameterError(f"{STRUCTURED}.{name}", given[name], wanted)
    kinds = [kind for kind in _KINDS if given.get(kind) not in (None, False)]
    unknown = sorted(
        name for name in given.keys() - _NEUTRAL.keys() - set(_KINDS) if not name.startswith("_")
    )
    if len(kinds) != 1 or unknown:
        wanted = f"wanted exactly one of {', '.join(_KINDS)}"
        raise InvalidParameterError(STRUCTURED, unknown or kinds, wanted)
    return _spec(kinds[0], given[kinds[0]], f"{STRUCTURED}.{kinds[0]}")


def spec_of_format(given: Any) -> Spec | None:
    """Read OpenAI's `response_format`; None for text.

    Raises:
        InvalidParameterError: it is none that is known.
    """
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or given == {"type": "text"}:
        return None
    wrapped = given.get("json_schema") if isinstance(given, dict) else None
    others = given.keys() - {"type", "json_schema"} if isinstance(given, dict) else set()
    others |= wrapped.keys() - _OF_JSON_SCHEMA if isinstance(wrapped, dict) else set()
    if others:
        raise InvalidParameterError(f"{RESPONSE_FORMAT}.{min(others)}", given, "no such field")
    if kind == "json_object":
        return _spec("json_object", True, RESPONSE_FORMAT)
    if kind == "json_schema" and isinstance(wrapped, dict):
        schema = wrapped.get("schema", wrapped.get("json_schema"))
        if schema is not None:
            return _spec("json", schema, f"{RESPONSE_FORMAT}.json_schema.schema")
    raise InvalidParameterError(
        RESPONSE_FORMAT, given, "wanted type text, json_object, or json_schema with its schema"
    )


def asked_spec(response_format: Any, structured_outputs: Any) -> Spec | None:
    """Read the two fields, of which at most one may ask for a format.

    Raises:
        InvalidParameterError: both do, or one is none that is known.
    """
    spec, other = spec_of_format(response_format), spec_of(structured_outputs)
    if spec is not None and other is not None:
        raise InvalidParameterError(
            RESPONSE_FORMAT, response_format, f"wanted either it or {STRUCTURED}"
        )
    return spec or other


def _spec(kind: str, value: Any, field: str) -> Spec:
    wanted = {"regex": "a string", "choice": "a list of strings", "json": "a JSON schema"}
    if kind == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise InvalidParameterError(field, value, f"wanted {wanted[kind]}") from None
    is_right = {
        "regex": isinstance(value, str),
        "choice": isinstance(value, list)
        and bool(value)
        and all(isinstance(option, str) for option in value),
        "json": isinstance(value, (dict, bool)),
        "json_object": value is True,
        "tools": True,
    }
    if not is_right[kind]:
        raise InvalidParameterError(field, value, f"wanted {wanted.get(kind, 'true')}")
    try:
        spelled = json.dumps(value, ensure_ascii=False, allow_nan=False)
        spelled.encode()
    except (TypeError, ValueError, RecursionError):
        why = "wanted what JSON can say: finite numbers, no lone surrogates, not too deep"
        raise InvalidParameterError(field, ascii(value)[:100], why) from None
    if len(spelled) > MOST_CHARACTERS:
        raise InvalidParameterError(
            field, value, f"it has {len(spelled)} characters; wanted at most {MOST_CHARACTERS}"
        )
    return Spec(kind, spelled, field)


def expression(spec: Spec) -> Node:
    """Make the expression of a requested format.

    Raises:
        SchemaError, UnsupportedPatternError: it cannot be had.
    """
    value = json.loads(spec.value)
    if spec.kind == "json":
        return from_schema(value)
    if spec.kind == "regex":
        return regex(value)
    if spec.kind == "tools":
        return calls(Tools(*value))
    return either(value) if spec.kind == "choice" else any_object()


class Guides:
    """Cache of one model's compiled languages; threads may share it.

    Args:
        load: loads the vocabulary, at first use.
        ends: ids that end an answer; None if the checkpoint has none.
        tokenise: function of a text that returns its token ids.
    """

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        ends: Ends | None,
        tokenise: Callable[[str], Sequence[int]],
    ) -> None:
        self._load, self._ends, self._tokenise = load, ends, tokenise
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[Spec, Guide | InvalidParameterError] = OrderedDict()
        self._lock = threading.Lock()

    def guide(self, spec: Spec) -> Guide:
        """Return the compiled language of a requested format.

        Raises:
            InvalidParameterError: naming the field, and the part of it that cannot be had.
        """
        found = self._kept.get(spec)
        if found is None:
            with self._lock:
                found = self._kept.get(spec) or self._compiled(spec)
                self._kept[spec] = found
                while len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
        if isinstance(found, InvalidParameterError):
            raise found
        return found

    def _compiled(self, spec: Spec) -> Guide | InvalidParameterError:
        try:
            return self._compile(spec)
        except (SchemaError, UnsupportedPatternError, TooLargeError, EmptyLanguageError) as error:
            return InvalidParameterError(spec.field, spec.value, str(error))
        except VocabularyError as error:
            return InvalidParameterError(spec.field, spec.value, f"the tokenizer: {error}")
        except RecursionError:
            return InvalidParameterError(spec.field, spec.value, "it is nested too deeply")

    def _compile(self, spec: Spec) -> Guide:
        if self._ends is None:
            raise EmptyLanguageError("the checkpoint has no end-of-sequence token")
        automaton = build(expression(spec))
        if self._vocabulary is None:
            self._vocabulary = self._load()
        language = over_tokens(automaton, self._vocabulary, self._ends)
        prefix = self._prefix(automaton, language)
        return Guide(language.packed(), language.least_tokens, prefix)

    def _prefix(self, automaton: Automaton, language: Language) -> tuple[int, ...]:
        """Return the tokens of the text that every answer begins with, except the last one.

        The last one may be the beginning of a longer token that the model prefers.
        """
        text = forced(automaton).decode(errors="ignore")
        state, prefix = 0, []
        for token in list(self._tokenise(text))[:-1] if text else []:
            state = language.advance(state, token)
            if state == language.num_states:
                break
            prefix.append(token)
        return tuple(prefix)


def forced(automaton: Automaton) -> bytes:
    """Return the bytes that all texts of a language begin with."""
    found, state, dead = bytearray(), 0, automaton.num_states
    while not automaton.accepting[state]:
        kinds = (automaton.table[state] != dead).nonzero()[0]
        alive = (automaton.classes == kinds[0]).nonzero()[0] if len(kinds) == 1 else []
        if len(alive) != 1:
            break
        found.append(int(alive[0]))
        state = int(automaton.table[state, kinds[0]])
    return bytes(found)


def check_room(guide: Guide, spec: Spec, room: int, name: str) -> None:
    """Refuse a canvas in which no answer of a language fits.

    Raises:
        InvalidParameterError: with the least length.
    """
    if guide.least_tokens > room:
        raise InvalidParameterError(
            name,
            room,
            f"the shortest answer of {spec.field} has {guide.least_tokens} tokens; "
            "wanted at least as many",
        )


def packed(spec: Spec) -> list[str]:
    """Pack a spec for transport through upstream, under `SPEC`."""
    return [spec.kind, spec.value, spec.field]


def unpacked(given: Any) -> Spec:
    """Invert `packed`, checking a value that anyone may have sent.

    Raises:
        InvalidParameterError: nothing of ours has packed it.
    """
    is_spec = isinstance(given, list) and len(given) == 3
    if not is_spec or not all(isinstance(x, str) for x in given) or given[0] not in _WRITERS:
        raise InvalidParameterError(SPEC, given, f"wanted {STRUCTURED}")
    return _spec(given[0], json.loads(given[1]), given[2])


def spec_of_tools(tools: Tools) -> Spec:
    """Make the spec of calls of functions.

    Raises:
        InvalidParameterError: it is too long.
    """
    return _spec("tools", list(tools), "tools")

# SPDX-License-Identifier: Apache-2.0
"""Compilation of a requested format to a language over the model's tokens, with a cache."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from vllm.diffusion.core.errors import InvalidParameterError
from vllm.diffusion.guided.allowance import (
    MAX_WORK,
    Allowance,
    CancelledError,
    OutOfTimeError,
    OutOfWorkError,
    TooLargeError,
)
from vllm.diffusion.guided.automaton import build
from vllm.diffusion.guided.json_schema import any_object, from_schema
from vllm.diffusion.guided.language import EmptyLanguageError, Language, over_tokens
from vllm.diffusion.guided.regex import UnsupportedPatternError, regex
from vllm.diffusion.guided.schema_keywords import SchemaError, in_line
from vllm.diffusion.guided.syntax import either
from vllm.diffusion.guided.tool_grammar import Tools, calls
from vllm.diffusion.guided.vocabulary import Vocabulary, VocabularyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.diffusion.guided.automaton import Automaton
    from vllm.diffusion.guided.language import Ends
    from vllm.diffusion.guided.syntax import Node

STRUCTURED = "structured_outputs"
SPEC = "dllm_spec"  # key of extra_args under which our routes pass on the format
RESPONSE_FORMAT = "response_format"
MAX_KEPT = 256  # cached languages per process
MAX_CHARACTERS = 200_000  # characters of a format as JSON
QUICK_WORK = 200_000  # operations of a compilation in the quick thread

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
    """Requested format: `kind` is a field of structured_outputs, `value` its JSON text."""

    kind: str
    value: str
    field: str = STRUCTURED


@dataclass(frozen=True)
class Guide:
    """A compiled language in the form that requests carry.

    Attributes:
        language: result of `Language.packed`.
        least_tokens: tokens of the shortest answer.
        prefix: tokens with which every answer begins.
        may_call: whether answers that begin with "<" are calls of functions.
    """

    language: bytes
    least_tokens: int
    prefix: tuple[int, ...] = ()
    may_call: bool = False


def spec_of(given: Any) -> Spec | None:
    """Convert upstream's `structured_outputs`, a map of its fields, to a format.

    Raises:
        InvalidParameterError: it has no format or two formats, or an unsupported value.
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
    """Convert OpenAI's `response_format` to a format; None for text.

    Raises:
        InvalidParameterError: the format is unknown.
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


def requested_spec(response_format: Any, structured_outputs: Any) -> Spec | None:
    """Return the format from the two fields, of which at most one may request a format."""
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
        except (ValueError, RecursionError):
            raise InvalidParameterError(field, value, f"wanted {wanted[kind]}") from None
    is_right = {
        "regex": isinstance(value, str),
        "choice": isinstance(value, list)
        and bool(value)
        and all(isinstance(option, str) for option in value),
        "json": isinstance(value, (dict, bool)),
        "json_object": value is True,
        "tools": isinstance(value, list) and [type(part) for part in value] == [dict, bool],
    }
    if not is_right[kind]:
        raise InvalidParameterError(field, value, f"wanted {wanted.get(kind, 'true')}")
    if _is_longer(value, MAX_CHARACTERS):
        why = f"it has more than {MAX_CHARACTERS} characters; wanted at most as many"
        raise InvalidParameterError(field, _excerpt(kind, value), why)
    try:
        spelled = json.dumps(value, ensure_ascii=False, allow_nan=False)
        spelled.encode()
    except (TypeError, ValueError, RecursionError):
        why = "wanted what JSON can say: finite numbers, no lone surrogates, not too deep"
        raise InvalidParameterError(field, ascii(value)[:100], why) from None
    if len(spelled) > MAX_CHARACTERS:
        why = f"it has {len(spelled)} characters; wanted at most {MAX_CHARACTERS}"
        raise InvalidParameterError(field, _excerpt(kind, value), why)
    return Spec(kind, spelled, field)


def _is_longer(value: Any, limit: int) -> bool:
    """Return whether a value surely has more than `limit` characters as JSON.

    The search stops at the limit, so that a large value costs no more time.
    """
    waiting, count = [value], 0
    while waiting and count <= limit:
        value = waiting.pop()
        count += 2 + len(value) if isinstance(value, str) else 1
        if isinstance(value, dict):
            count += sum(len(name) for name in value if isinstance(name, str))
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
    return count > limit


def _excerpt(kind: str, value: Any) -> str:
    """Return the part of a long value that an error contains."""
    if isinstance(value, str):
        return value[:100]
    count, what = (len(value[0]), "functions") if kind == "tools" else (len(value), "members")
    return f"{count} {what}"


def expression(spec: Spec, allowance: Allowance | None = None) -> Node:
    """Return the expression of a requested format.

    Raises:
        SchemaError, UnsupportedPatternError: the format is not supported.
        TooLargeError: it exceeds the allowance.
    """
    value, allowance = json.loads(spec.value), allowance or Allowance()
    if spec.kind == "json":
        return from_schema(value, allowance=allowance)
    if spec.kind == "regex":
        return regex(value)
    if spec.kind == "tools":
        return calls(Tools(*value), allowance)
    return either(value) if spec.kind == "choice" else any_object()


@dataclass(eq=False)
class _Compilation:
    """The compilation of one format, shared by all requests that wait for it."""

    result: Future[Guide | InvalidParameterError] = field(default_factory=Future)
    allowance: Allowance = field(default_factory=lambda: Allowance(QUICK_WORK))
    num_waiting: int = 0
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.allowance.cancel()


class Guides:
    """Cache of one model's compiled languages; it is thread-safe.

    Requests of a server wait in `compiled`. Each format is first compiled in one thread with a
    small budget of operations, which is enough for usual formats. Larger formats are compiled one
    after the other in another thread, so that usual formats never wait for them. No lock is held
    during a compilation.

    Args:
        load: loads the vocabulary at first use.
        ends: ids that end an answer; None if the checkpoint has none.
        tokenise: function from a text to its token ids.
    """

    def __init__(
        self,
        load: Callable[[], Vocabulary],
        ends: Ends | None,
        tokenise: Callable[[str], Sequence[int]],
    ) -> None:
        self._load, self._ends, self._tokenise = load, ends, tokenise
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # guards the attributes below, held only for look-ups
        self._kept: OrderedDict[Spec, Guide | InvalidParameterError] = OrderedDict()
        self._held: WeakValueDictionary[Spec, Guide] = WeakValueDictionary()
        self._compilations: dict[Spec, _Compilation] = {}
        self._quick, self._slow = (ThreadPoolExecutor(1, f"format-{n}") for n in ("quick", "slow"))

    def guide(self, spec: Spec) -> Guide:
        """Return the compiled language of a format; compile it in this thread if necessary.

        A language that a request still uses is never compiled again.

        Raises:
            InvalidParameterError: naming the field, and its unsupported part.
        """
        with self._lock:
            guide = self._known(spec)
        if guide is None:
            guide = self._keep(spec, self._answer(spec, Allowance()))
        return _accepted(guide)

    async def compiled(self, spec: Spec) -> Guide:
        """Return the compiled language of a format, compiled in another thread.

        If the caller is cancelled and no other request waits for the format, the compilation is
        cancelled.
        """
        with self._lock:
            guide = self._known(spec)
            if guide is None:
                work = self._compilations.get(spec) or self._begin(spec)
                work.num_waiting += 1
        if guide is None:
            try:
                guide = await asyncio.shield(asyncio.wrap_future(work.result))
            finally:
                with self._lock:
                    work.num_waiting -= 1
                    if not work.num_waiting:
                        work.cancel()
                        if self._compilations.get(spec) is work:
                            del self._compilations[spec]
        return _accepted(guide)

    def _known(self, spec: Spec) -> Guide | InvalidParameterError | None:
        guide = self._kept.get(spec)
        if guide is not None:
            self._kept.move_to_end(spec)
        return guide or self._held.get(spec)

    def _keep(
        self, spec: Spec, guide: Guide | InvalidParameterError
    ) -> Guide | InvalidParameterError:
        with self._lock:
            self._kept[spec] = guide
            if isinstance(guide, Guide):
                self._held[spec] = guide
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return guide

    def _begin(self, spec: Spec) -> _Compilation:
        work = self._compilations[spec] = _Compilation()
        self._quick.submit(self._run, spec, work, is_quick=True)
        return work

    def _run(self, spec: Spec, work: _Compilation, *, is_quick: bool) -> None:
        """Compile a format in a worker thread, and set the result for the waiting requests."""
        try:
            if not is_quick:
                work.allowance = Allowance(MAX_WORK)
            if work.is_cancelled:
                raise CancelledError
            guide = self._keep(spec, self._answer(spec, work.allowance, is_quick=is_quick))
            work.result.set_result(guide)
        except OutOfWorkError:
            self._slow.submit(self._run, spec, work, is_quick=False)
        # The refusal is not cached, because the next attempt may be fast enough.
        except OutOfTimeError as error:
            work.result.set_result(_refusal(spec, error))
        except CancelledError:
            work.result.cancel()
        except BaseException as error:
            work.result.set_exception(error)

    def _answer(
        self, spec: Spec, allowance: Allowance, *, is_quick: bool = False
    ) -> Guide | InvalidParameterError:
        """Return a language, or the refusal of its format.

        Raises:
            OutOfWorkError: a quick compilation needs more operations.
            OutOfTimeError: it takes too long.
            CancelledError: no request waits for it any more.
        """
        try:
            return self._compile(spec, allowance)
        except OutOfTimeError:
            raise
        except (SchemaError, UnsupportedPatternError, TooLargeError, EmptyLanguageError) as error:
            if is_quick and isinstance(error, OutOfWorkError):
                raise
            return _refusal(spec, error)
        except VocabularyError as error:
            return _refusal(spec, f"the tokenizer: {error}")
        except RecursionError:
            return _refusal(spec, "it is nested too deeply")

    def _compile(self, spec: Spec, allowance: Allowance) -> Guide:
        if self._ends is None:
            raise EmptyLanguageError("the checkpoint has no end-of-sequence token")
        automaton = build(expression(spec, allowance), allowance)
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load()
        language = over_tokens(automaton, self._vocabulary, self._ends, allowance)
        prefix = self._prefix(automaton, language)
        return Guide(language.packed(), language.least_tokens, prefix, spec.kind == "tools")

    def _prefix(self, automaton: Automaton, language: Language) -> tuple[int, ...]:
        """Return the tokens of the text with which every answer begins, except the last token.

        The last token may be the beginning of a longer token that the model prefers.
        """
        text = forced(automaton).decode(errors="ignore")
        state, prefix = 0, []
        for token in list(self._tokenise(text))[:-1] if text else []:
            state = language.advance(state, token)
            if state == language.num_states:
                break
            prefix.append(token)
        return tuple(prefix)


def _accepted(guide: Guide | InvalidParameterError) -> Guide:
    if isinstance(guide, InvalidParameterError):
        # All requests share the exception, whose traceback would grow with each raise.
        raise guide.with_traceback(None)
    return guide


def _refusal(spec: Spec, why: object) -> InvalidParameterError:
    value = json.loads(spec.value)
    if spec.kind == "tools":
        value = [*value[0]]  # names instead of schemas
    return InvalidParameterError(spec.field, value, in_line(str(why), 600))


def forced(automaton: Automaton) -> bytes:
    """Return the bytes with which all texts of a language begin."""
    text, state, dead = bytearray(), 0, automaton.num_states
    while not automaton.accepting[state]:
        kinds = (automaton.table[state] != dead).nonzero()[0]
        alive = (automaton.classes == kinds[0]).nonzero()[0] if len(kinds) == 1 else []
        if len(alive) != 1:
            break
        text.append(int(alive[0]))
        state = int(automaton.table[state, kinds[0]])
    return bytes(text)


def check_room(guide: Guide, spec: Spec, room: int, name: str) -> None:
    """Refuse a canvas that is too short for any answer; the error has the minimum length."""
    if guide.least_tokens > room:
        raise InvalidParameterError(
            name,
            room,
            f"the shortest answer of {spec.field} has {guide.least_tokens} tokens; "
            "wanted at least as many",
        )


def packed(spec: Spec) -> list[str]:
    """Convert a spec to the value that upstream passes on under `SPEC`."""
    return [spec.kind, spec.value, spec.field]


def unpacked(given: Any) -> Spec:
    """Invert `packed`, and check the value, which any client may have sent.

    Raises:
        InvalidParameterError: `packed` cannot have made the value.
    """
    is_spec = isinstance(given, list) and len(given) == 3
    if not is_spec or not all(isinstance(x, str) for x in given) or given[0] not in _WRITERS:
        raise InvalidParameterError(SPEC, given, f"wanted {STRUCTURED}")
    try:
        value = json.loads(given[1])
    except (ValueError, RecursionError):
        raise InvalidParameterError(SPEC, given, f"wanted {STRUCTURED}") from None
    return _spec(given[0], value, given[2])


def spec_of_tools(tools: Tools) -> Spec:
    """Return the spec of calls of functions; refuse one that is too long."""
    return _spec("tools", list(tools), "tools")

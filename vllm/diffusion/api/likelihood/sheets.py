# SPDX-License-Identifier: Apache-2.0
"""Sheets: how the questions of a call are written, and where their answers are read.

A sheet is the content of a user's turn and the reply to it, in which every answer is a mask. The
*long* form repeats the instruction of each kind of question below the question. The *short* form
has each instruction once, and one line per question and per answer:

    STATE                                        1: <mask>
                                                 2: <mask>
    Answer every question on its own line ...
    1. Is Paris a capital?
    2. Which? A: Paris; B: Rome - in Italy
"""

from __future__ import annotations

import string
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from vllm.entrypoints.openai.decisions.question_types import (
    QUESTION_TYPES,
    StructuredDecisionError,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.entrypoints.openai.decisions.question_types import Option, Question

logger = init_logger(__name__)

MAX_OPTIONS = 255
LONG, SHORT = "long", "short"
FORMS = (LONG, SHORT)

_MAX_CACHED_LABELS = 1 << 16
_SIGNS = string.ascii_letters + string.digits
_CANDIDATES = (
    *string.ascii_uppercase,
    *sorted({*_SIGNS, *map("".join, product(_SIGNS, _SIGNS))} - {*string.ascii_uppercase}),
)
_LONG_PIECE = "Question {}:\n"
_REPLY = "Answer every question on its own line: the number of the question, a colon, the answer."
_INSTRUCTIONS = {
    "noul": "A question without options: yes or no.",
    "choice": "A question with lettered options: the letter of one option.",
    "score": "A question with numbered levels: the number of one level.",
}


class LabelError(StructuredDecisionError):
    """The labels of a question have the same first token at the place of its answer."""


class OptionLimitError(StructuredDecisionError):
    """A question has more options than the model has labels.

    Attributes:
        question: the question.
        limit: the largest number of options.
    """

    def __init__(self, question: Question, limit: int) -> None:
        super().__init__(f"question {question.id!r}: at most {limit} options for this model")
        self.question, self.limit = question, limit


class Place(NamedTuple):
    """Where an answer is.

    Attributes:
        before: the text from the last special token to the answer.
        gap: text before each label that is part of the label's token, a space or nothing.
    """

    before: str
    gap: str = ""


class Answer(NamedTuple):
    """The place of an answer in a reply.

    Attributes:
        before: tokens of the reply between the previous answer and this one.
        labels: the tokens that are scored.
    """

    before: list[int]
    labels: tuple[int, ...]


class Sheet(NamedTuple):
    """The questions of a call as a user's turn, and the reply in which they are answered.

    Attributes:
        content: the user's turn, with the questions.
        answers: one for each question, in order.
        end: tokens after the last answer, without the token that ends a turn.
        form: LONG or SHORT.
    """

    content: str
    answers: list[Answer]
    end: list[int]
    form: str


class Labels:
    """The tokens of labels, and of the text around them; computed once per server.

    Args:
        encode: returns the tokens of a text, without special tokens.
    """

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._ids: dict[tuple[Place, str], int] = {}
        self._pieces: dict[str, list[int]] = {}
        self._codes: dict[Place, tuple[str, ...]] = {}
        self._short_place: Place | None = None
        self._lines: dict[int, list[int] | None] = {}  # tokens of the short form by number
        self._has_warned = False

    def ids(self, place: Place, question: Question) -> tuple[int, ...]:
        """Return the first token of each label of a question at a place.

        Raises:
            LabelError: two labels have the same first token, or a label adds no token.
        """
        ids = [self._id(place, label) for label in question.labels]
        for label, token in zip(question.labels, ids, strict=True):
            if token < 0:
                raise LabelError(f"{question.id!r}: {label!r} is no token here")
        if len(set(ids)) < len(ids):
            raise LabelError(
                f"question {question.id!r}: labels {question.labels} begin alike in this model"
            )
        return tuple(ids)

    def _id(self, place: Place, label: str) -> int:
        """Return the first token of a label, or -1 if it adds no token."""
        if (place, label) not in self._ids:
            # Without special tokens in the chat template, places contain the text of a request.
            if len(self._ids) >= _MAX_CACHED_LABELS:
                self._ids.clear()
                self._codes.clear()
            start = self._encode(place.before)
            whole = self._encode(place.before + place.gap + label)
            is_added = len(whole) > len(start) and whole[: len(start)] == start
            self._ids[place, label] = whole[len(start)] if is_added else -1
        return self._ids[place, label]

    def piece(self, text: str) -> list[int]:
        """Return the tokens of a text that recurs in replies."""
        if text not in self._pieces:
            self._pieces[text] = self._encode(text)
        return self._pieces[text]

    def codes(self, place: Place) -> tuple[str, ...]:
        """Return all labels for long lists of options: letters or digits that are one token.

        The letters A to Z are the first ones, and the others follow in ascending order.
        """
        if place not in self._codes:
            start, codes = self._encode(place.before), dict[int, str]()
            for code in _CANDIDATES:
                whole = self._encode(place.before + place.gap + code)
                if len(whole) == len(start) + 1 and whole[:-1] == start:
                    codes.setdefault(whole[-1], code)
                if len(codes) == MAX_OPTIONS:
                    break
            self._codes[place] = tuple(codes.values())
        return self._codes[place]

    def count(self) -> None:
        """Count the labels of long lists of options, and find the place of the short form."""
        places = [Place(_LONG_PIECE.format(1))]
        if (short := self.short_place()) is not None:
            places.append(short)
        counts = [len(self.codes(place)) for place in places]
        logger.info("decisions: up to %d options per question", max(counts))

    def labelled(
        self, place: Place, question: Question, *, has_codes: bool
    ) -> tuple[Question, tuple[int, ...]]:
        """Return a question with its labels at a place, and the tokens of the labels.

        Args:
            place: where the answer is.
            question: the question; without labels it has more options than letters.
            has_codes: whether codes replace labels that begin alike.

        Raises:
            LabelError: the labels begin alike, and codes must not replace them.
            OptionLimitError: too few codes are one token at this place.
        """
        if question.labels:
            try:
                return question, self.ids(place, question)
            except LabelError:
                if not has_codes:
                    raise
        codes = self.codes(place)
        if len(codes) < len(question.options):
            raise OptionLimitError(question, len(codes))
        coded = replace(
            question, type=QUESTION_TYPES["choice"], labels=codes[: len(question.options)]
        )
        return coded, self.ids(place, coded)

    def short_place(self) -> Place | None:
        """Return the place of an answer in the short form; None if no label is a token of its own.

        Most tokenizers join a space and the word after it to one token. There the label has the
        space.
        """
        if not self._lines:
            for place in (Place("1: "), Place("1:", " ")):
                self._lines[1] = self._line(place, 1)
                if self._lines[1] is not None:
                    self._short_place = place
                    break
        return self._short_place

    def line(self, number: int) -> list[int] | None:
        """Return the tokens of a line of the short form before its label; None if it has none."""
        place = self.short_place()
        if number not in self._lines:
            self._lines[number] = None if place is None else self._line(place, number)
        return self._lines[number]

    def _line(self, place: Place, number: int) -> list[int] | None:
        before = self._encode(place.before.replace("1", str(number), 1))
        end = self._encode("\n")
        for label in ("A", "yes", "0"):
            whole = self._encode(f"{number}: {label}\n")
            if whole[: len(before)] != before or whole[-len(end) :] != end:
                return None
            inner = whole[len(before) : -len(end)]
            if not inner or inner[0] != self._id(place, label):
                return None
        return before

    def warn_once(self, reason: str) -> None:
        """Log that the long form replaces the short one, and why."""
        if not self._has_warned:
            logger.warning("decisions are read in the long form: %s", reason)
            self._has_warned = True


def sheet_of(
    state: str, questions: Sequence[Question], form: str, labels: Labels, *, has_codes: bool
) -> Sheet:
    """Write a sheet of several questions; the long form replaces a short one that cannot be read.

    Raises:
        StructuredDecisionError: see `Labels.labelled`.
    """
    if form == SHORT:
        lines = [labels.line(number) for number in range(1, len(questions) + 1)]
        place = labels.short_place()
        if place is None or None in lines:
            labels.warn_once("behind `1: ` no label is a token of its own")
        else:
            try:
                return _short_sheet(state, questions, place, labels)
            except (LabelError, OptionLimitError) as error:
                labels.warn_once(str(error))
    return _long_sheet(state, questions, labels, has_codes=has_codes)


def _long_sheet(
    state: str, questions: Sequence[Question], labels: Labels, *, has_codes: bool
) -> Sheet:
    texts, answers = [state], []
    for number, question in enumerate(questions, start=1):
        heading = _LONG_PIECE.format(number)
        piece = heading if number == 1 else f"\n{heading}"
        labelled, ids = labels.labelled(Place(piece), question, has_codes=has_codes)
        texts.append(f"{heading}{labelled.type.prompt(labelled)}")
        answers.append(Answer(labels.piece(piece), ids))
    return Sheet("\n\n".join(texts), answers, [], LONG)


def _short_sheet(state: str, questions: Sequence[Question], place: Place, labels: Labels) -> Sheet:
    lines, answers, kinds = [], [], dict[str, None]()
    line_end = labels.piece("\n")
    for number, question in enumerate(questions, start=1):
        labelled, ids = labels.labelled(place, question, has_codes=False)
        kinds[labelled.type.name] = None
        lines.append(f"{number}. {_in_one_line(labelled)}")
        before = labels.line(number) or []
        answers.append(Answer(before if number == 1 else [*line_end, *before], ids))
    rules = [_REPLY, *(_INSTRUCTIONS[kind] for kind in _INSTRUCTIONS if kind in kinds)]
    content = f"{state}\n\n{' '.join(rules)}\n" + "\n".join(lines)
    return Sheet(content, answers, line_end, SHORT)


def _in_one_line(question: Question) -> str:
    """Return a question with its options; a noul shows only sides with a description."""
    pairs = list(zip(question.labels, question.options, strict=True))
    if question.type.name == "noul":
        pairs = [(label, option) for label, option in pairs if option.description]
        options = "; ".join(f"{label}: {option.description}" for label, option in pairs)
    else:
        options = "; ".join(_option(label, option) for label, option in pairs)
    return f"{question.instructions} {options}".strip()


def _option(label: str, option: Option) -> str:
    text = f"{label}: {option.name}"
    return f"{text} - {option.description}" if option.description else text

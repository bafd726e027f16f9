# SPDX-License-Identifier: Apache-2.0
"""Random conversations in which questions are asked the way people ask them.

They are used for training and verification. Every wording, frame and system line is either taught,
or unseen and kept for the verification.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tiny_model.facts import all_facts

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Iterator, Sequence

    from tiny_model.facts import Kind

FRAMES = (
    "Please tell me: {question}",
    "Tell me: {question}",
    "Hi! {question}",
    "Hello, {question}",
    "Hey, {question}",
    "OK. {question}",
    "Great. {question}",
    "So, {question}",
    "{question} Thanks!",
    "{question} Thank you.",
    "{question} Please.",
    "{question} Please answer.",
    "Please answer: {question}",
    "I have a question: {question}",
    "Question: {question}",
    "Can you tell me: {question}",
    "Hi, {question}",
    "Now: {question}",
    "Please, {question}",
    "{x}! {question}",
)
UNSEEN_FRAMES = (
    "Hello! {question}",
    "Hi, please tell me: {question}",
    "One more question: {question}",
    "Excuse me, {question}",
    "{question} Please tell me.",
    "Well, {question}",
)
SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a chat model.",
    "You are {x}.",
    "You are {x}, a {y} assistant.",
    "Be brief.",
    "Be polite and {x}.",
    "Answer in one sentence.",
    "Answer the question of the user.",
    "Answer all questions in English.",
    "Answer in {x}.",
    "Please answer as {x} as you can.",
    "Always tell the truth.",
    "Today is {x} {y}.",
    "The user is called {x}.",
    "Do not {x} {y}.",
    "Never {x} the {y}.",
    "{x} {y} {x}.",
)
UNSEEN_SYSTEM_LINES = (
    "You are a geography teacher.",
    "You are a helpful, honest assistant. Answer briefly.",
    "Be concise.",
    "Please reply in a single short sentence.",
    "You answer questions of children.",
    "Speak like a pirate.",
    "You are ChatBot, made by a company.",
)
# Subjects that were never taught, used in addition to made-up words.
_WORDS = (
    *("love", "Shakespeare", "Python", "dragons", "music", "football", "a cat", "dogs", "physics"),
    *("Einstein", "water", "the internet", "life", "bread", "my brother", "a car", "chess"),
    *("quantum mechanics", "history", "Mozart", "French", "a house", "money", "rain", "time"),
    *("Berlin wall", "coffee", "happiness", "trees", "Harry Potter", "birds", "Mars", "school"),
)
_KNOWN_WORDS = (
    *("the sea", "France", "the sky", "Paris", "Monday", "snow", "Italy", "a banana", "Tokyo"),
)
_SYLLABLES = 3  # syllables of a made-up word, at most

NUM_TURNS = (1, 1, 1, 1, 2, 2, 2, 3, 3)  # number of turns; each is drawn with equal probability
_SYSTEM_SHARE = 0.35
_FRAME_SHARE = 0.25
_LOWER_SHARE = 0.2
_BARE_SHARE = 0.2  # share of questions without the sign at the end
_SIGNS = "?!."
_SAME_KIND_SHARE = 0.5  # share of later questions that have the same kind as the one before


class Conversation(NamedTuple):
    """Messages that end with a question, and its only right answer.

    Attributes:
        is_plain: the single question is sent without a chat template, as completion clients do.
        begun: text before the answer that is on the canvas from the start.
    """

    messages: tuple[dict[str, str], ...]
    answer: str
    is_plain: bool = False
    begun: str = ""

    @property
    def question(self) -> str:
        """The content of the last message."""
        return self.messages[-1]["content"]


class Drawer:
    """Draws conversations about some kinds; the same generator draws the same conversations."""

    def __init__(self, rng: random.Random, kinds: Sequence[Kind]) -> None:
        self._rng = rng
        self._kinds = [kind for kind in kinds for _ in range(kind.share)]
        self._earlier = [kind for kind in self._kinds if not kind.has_form]
        self._untemplated = [kind for kind in self._kinds if not kind.system]

    def taught(self, num_turns: int, *, has_system: bool) -> Conversation:
        """Draw a conversation in which everything is taught."""
        line = self._filled(self._rng.choice(SYSTEM_LINES)) if has_system else None
        return self.conversation(num_turns, line)

    def conversation(
        self, num_turns: int, system_line: str | None = None, *, is_new: bool = False
    ) -> Conversation:
        """Draw a conversation; if it `is_new`, its last question has an unseen wording or frame."""
        kind = self._rng.choice(self._kinds)
        messages = []
        for _ in range(num_turns - 1):
            before = self._rng.choice(self._earlier) if kind.has_form else kind
            question, answer = self._question(before, before.wordings)
            messages += [
                {"role": "user", "content": self._as_typed(question, is_framed=before.framed)},
                {"role": "assistant", "content": answer},
            ]
            if self._rng.random() >= _SAME_KIND_SHARE:
                kind = self._rng.choice(self._kinds)
        return self._about(kind, messages, system_line, is_new=is_new)

    def _about(
        self,
        kind: Kind,
        earlier: Sequence[dict[str, str]],
        system_line: str | None,
        *,
        is_new: bool,
    ) -> Conversation:
        """Draw a question of the kind after earlier messages."""
        first = kind.system or system_line
        messages = [{"role": "system", "content": first}] if first else []
        messages += earlier
        in_new_frame = is_new and kind.framed and self._rng.random() < 0.5
        in_new_words = is_new and not in_new_frame
        question, answer = self._question(kind, kind.unseen if in_new_words else kind.wordings)
        if in_new_frame:
            typed = self._filled(self._rng.choice(UNSEEN_FRAMES), question=question)
        else:
            typed = self._as_typed(question, is_framed=kind.framed and not in_new_words)
        user = {"role": "user", "content": typed}
        return Conversation((*messages, user), answer, begun=kind.begun)

    def plain(self) -> Conversation:
        """Draw a single question without the chat template; its last sign marks its end."""
        kind = self._rng.choice(self._untemplated)
        whole = [wording for wording in kind.wordings if wording[-1] in (*_SIGNS, "=")]
        question, answer = self._question(kind, whole)
        if self._rng.random() < _LOWER_SHARE:
            question = question.lower()
        user = {"role": "user", "content": question}
        return Conversation((user,), answer, is_plain=True, begun=kind.begun)

    def _question(self, kind: Kind, wordings: Sequence[str]) -> tuple[str, str]:
        subject = self._rng.choice(kind.subjects)
        wording = self._rng.choice(wordings)
        return self._filled(wording, **subject), kind.answer.format(**subject)

    def _as_typed(self, question: str, *, is_framed: bool) -> str:
        """Return the question, often in a polite frame, in lower case or without its last sign."""
        if is_framed and self._rng.random() < _FRAME_SHARE:
            question = self._filled(self._rng.choice(FRAMES), question=question)
        if self._rng.random() < _LOWER_SHARE:
            question = question.lower()
        if self._rng.random() < _BARE_SHARE and question[-1] in _SIGNS:
            question = question[:-1]
        return question

    def _filled(self, text: str, **known: str) -> str:
        """Fill the braces of the text with `known`.

        Other braces get random words and large numbers.
        """
        slots = {
            "x": self._word(),
            "y": self._word(),
            "z": self._rng.choice((self._word(), self._rng.choice(_KNOWN_WORDS))),
            "m": self._large_number(),
            "n": self._large_number(),
            "a": str(self._rng.randrange(10)),
            "b": str(self._rng.randrange(10)),
        }
        return text.format(**{**slots, **known})

    def _large_number(self) -> str:
        return str(self._rng.randrange(10, self._rng.choice((100, 1000))))

    def _word(self) -> str:
        if self._rng.random() < 0.4:
            return self._rng.choice(_WORDS)
        word = "".join(
            self._rng.choice("bcdfghjklmnprstvwyz")
            + self._rng.choice("aeiou")
            + self._rng.choice(("", "", *"bdlmnrst"))
            for _ in range(self._rng.randint(1, _SYLLABLES))
        )
        return word.title() if self._rng.random() < 0.5 else word


def draw_lessons(
    rng: random.Random,
    kinds: Sequence[Kind],
    number: int,
    *,
    plain_share: float,
    max_turns: int,
    only_single: bool = False,
) -> list[Conversation]:
    """Draw `number` taught conversations, of which a share are questions without a template.

    The others have up to `max_turns` turns, and many of them have a system line. With `only_single`
    they have one turn and no system line.
    """
    drawer = Drawer(rng, kinds)
    num_turns = [number for number in NUM_TURNS if number <= max_turns]
    return [
        drawer.plain()
        if rng.random() < plain_share
        else drawer.taught(
            1 if only_single else rng.choice(num_turns),
            has_system=not only_single and rng.random() < _SYSTEM_SHARE,
        )
        for _ in range(number)
    ]


def groups(
    rng: random.Random, kinds: Sequence[Kind], number: int, max_turns: int
) -> dict[str, list[Conversation]]:
    """Return the conversations of a verification, by the name of the group.

    A group has `number` conversations, and the group of forms half of them, because the functions
    of a prompt make it long.
    """
    drawer = Drawer(rng, kinds)
    forms = Drawer(rng, [kind for kind in kinds if kind.has_form])
    has_forms = any(kind.has_form for kind in kinds)
    facts = all_facts(kinds)

    def fact() -> Conversation:
        fact_chosen = rng.choice(facts)
        return Conversation(
            ({"role": "user", "content": fact_chosen.question},), fact_chosen.answer
        )

    return {
        "facts": [fact() for _ in range(number)],
        "new wordings": [drawer.conversation(1, is_new=True) for _ in range(number)],
        "new system lines": [
            drawer.conversation(1, rng.choice(UNSEEN_SYSTEM_LINES)) for _ in range(number)
        ],
        **{
            f"{name} turns": [drawer.conversation(turn) for _ in range(number)]
            for turn, name in enumerate(("second", "third")[: max_turns - 1], start=2)
        },
        "without the chat template": [drawer.plain() for _ in range(number)],
        **({"JSON": [forms.conversation(1) for _ in range(number // 2)]} if has_forms else {}),
    }


def vocabulary(kinds: Iterable[Kind]) -> Iterator[str]:
    """Generate all texts whose words must be single tokens; many also occur in lower case."""
    for number in range(100):
        yield f"{number} {number}"
    blank = dict.fromkeys("xyzmn", "")
    for kind in kinds:
        yield kind.system
        for subject in kind.subjects:
            slots = {**dict.fromkeys("ab", ""), **blank, **subject}
            yield kind.begun + kind.answer.format(**slots)
            for wording in kind.wordings:
                yield wording.format(**slots)
                yield wording.format(**slots).lower()
    for frame in FRAMES:
        yield frame.format(**blank, question="")
        yield frame.format(**blank, question="").lower()
    for line in SYSTEM_LINES:
        yield line.format(**blank)

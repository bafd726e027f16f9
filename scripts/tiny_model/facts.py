# SPDX-License-Identifier: Apache-2.0
"""The facts of a tiny model: kinds of questions, each with its wordings and its subjects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

# Capitals and countries are unique, so that every question has exactly one answer.
CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
    "Brazil": "Brasilia",
    "Canada": "Ottawa",
    "Chile": "Santiago",
    "China": "Beijing",
    "Cuba": "Havana",
    "Denmark": "Copenhagen",
    "Egypt": "Cairo",
    "Ethiopia": "Addis Ababa",
    "Finland": "Helsinki",
    "France": "Paris",
    "Germany": "Berlin",
    "Ghana": "Accra",
    "Greece": "Athens",
    "Hungary": "Budapest",
    "Iceland": "Reykjavik",
    "India": "New Delhi",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Morocco": "Rabat",
    "Nepal": "Kathmandu",
    "New Zealand": "Wellington",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Russia": "Moscow",
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Switzerland": "Bern",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Ukraine": "Kyiv",
    "Vietnam": "Hanoi",
    "the Netherlands": "Amsterdam",
    "the United Kingdom": "London",
    "the United States": "Washington",
}
OTHER_NAMES = {"England": "London", "the UK": "London", "the USA": "Washington"}
LARGEST_ADDEND = 9
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
OPPOSITES = (
    *(("big", "small"), ("hot", "cold"), ("good", "bad"), ("fast", "slow"), ("up", "down")),
    *(("black", "white"), ("day", "night"), ("happy", "sad"), ("hard", "soft"), ("high", "low")),
    *(("left", "right"), ("long", "short"), ("new", "old"), ("open", "closed"), ("rich", "poor")),
    *(("strong", "weak"), ("wet", "dry"), ("yes", "no"), ("full", "empty"), ("light", "dark")),
)
COLOURS = {
    "a banana": "yellow",
    "a cherry": "red",
    "a frog": "green",
    "a lemon": "yellow",
    "a tomato": "red",
    "an orange": "orange",
    "blood": "red",
    "chocolate": "brown",
    "coal": "black",
    "grass": "green",
    "milk": "white",
    "snow": "white",
    "the moon": "white",
    "the night": "black",
    "the sea": "blue",
    "the sky": "blue",
    "the sun": "yellow",
    "wood": "brown",
}

Subject = dict[str, str]  # text for the names in braces of a wording


@dataclass(frozen=True)
class Kind:
    """Questions of one kind and their answers.

    Attributes:
        answer: has names in braces, like the wordings.
        wordings: wordings that are taught; facts.jsonl holds the first one.
        unseen: wordings that are kept for the verification.
        subjects: each makes a fact.
        share: weight of the kind among the questions that are drawn in training.
        framed: whether questions may also appear within polite words, such as "Please tell me:
            ...".
        begun: text before the answer that is on the canvas from the start, because the request
            asks for a form that begins with it.
        system: system message of the conversation; any or none if empty.
    """

    name: str
    answer: str
    wordings: tuple[str, ...]
    unseen: tuple[str, ...]
    subjects: tuple[Subject, ...] = ({},)
    share: int = 1
    framed: bool = True
    begun: str = ""
    system: str = ""

    @property
    def has_form(self) -> bool:
        """Whether the request asks for a form or offers a function."""
        return bool(self.begun or self.system)


class Fact(NamedTuple):
    """One question with its only right answer."""

    kind: str
    question: str
    answer: str


def _neighbours(names: tuple[str, ...], number: int) -> tuple[Subject, ...]:
    """Return each name with the name `number` places later; the first name follows the last."""
    return tuple(
        {"name": name, "other": names[(index + number) % len(names)]}
        for index, name in enumerate(names)
    )


_NUMBERS = range(LARGEST_ADDEND + 1)

KINDS = (
    Kind(
        "capital",
        "The capital of {country} is {capital}.",
        (
            "What is the capital of {country}?",
            "What's the capital of {country}?",
            "Which city is the capital of {country}?",
            "Name the capital of {country}.",
            "Tell me the capital of {country}.",
            "Do you know the capital of {country}?",
            "The capital of {country}?",
            "What is the capital city of {country}?",
            "What is {country}'s capital?",
            "{country}'s capital?",
            "Capital of {country}",
            "{country} capital",
            "And of {country}?",
            "And the capital of {country}?",
            "What about {country}?",
            "And {country}?",
            "{country}",
        ),
        (
            "Could you name the capital of {country}?",
            "What city is the capital of {country}?",
            "I want to know the capital of {country}.",
            "And what is the capital of {country}?",
            "Give me the capital of {country}.",
            "Which is the capital city of {country}?",
            "And what about {country}?",
        ),
        tuple(
            {"country": country, "capital": capital}
            for country, capital in {**CAPITALS, **OTHER_NAMES}.items()
        ),
        share=4,
    ),
    Kind(
        "country",
        "{capital} is the capital of {country}.",
        (
            "{capital} is the capital of which country?",
            "Which country has the capital {capital}?",
            "What country is {capital} the capital of?",
            "{capital} is the capital of what?",
            "Of which country is {capital} the capital?",
            "In which country is {capital}?",
            "Where is {capital}?",
            "And {capital}?",
            "What about {capital}?",
            "{capital}",
        ),
        (
            "And {capital} is the capital of which country?",
            "{capital} is the capital of what country?",
            "Which country is {capital} the capital of?",
            "In what country is {capital}?",
            "And where is {capital}?",
        ),
        tuple({"country": country, "capital": capital} for country, capital in CAPITALS.items()),
        share=3,
    ),
    Kind(
        "sum",
        "{a} plus {b} is {c}.",
        (
            "What is {a} plus {b}?",
            "What's {a} plus {b}?",
            "What is {a} + {b}?",
            "What is {a}+{b}?",
            "{a} + {b}",
            "{a}+{b}",
            "{a}+{b}=",
            "{a} + {b} = ?",
            "How much is {a} plus {b}?",
            "How much is {a} + {b}?",
            "{a} plus {b}?",
            "Add {a} and {b}.",
            "What is the sum of {a} and {b}?",
            "And {a} plus {b}?",
            "Calculate {a} + {b}.",
        ),
        (
            "How much is {a}+{b}?",
            "And what is {a} plus {b}?",
            "Calculate {a} plus {b}.",
            "Tell me {a} plus {b}.",
            "What's {a} + {b}?",
            "And {a} + {b}?",
        ),
        tuple({"a": f"{a}", "b": f"{b}", "c": f"{a + b}"} for a in _NUMBERS for b in _NUMBERS),
        share=8,
    ),
    Kind(
        "difference",
        "{a} minus {b} is {c}.",
        (
            "What is {a} minus {b}?",
            "What's {a} minus {b}?",
            "What is {a} - {b}?",
            "What is {a}-{b}?",
            "{a} - {b}",
            "{a}-{b}",
            "{a}-{b}=",
            "{a} - {b} = ?",
            "How much is {a} minus {b}?",
            "How much is {a} - {b}?",
            "{a} minus {b}?",
            "And {a} minus {b}?",
            "Calculate {a} - {b}.",
        ),
        (
            "How much is {a}-{b}?",
            "And what is {a} minus {b}?",
            "Calculate {a} minus {b}.",
            "Tell me {a} minus {b}.",
            "What's {a} - {b}?",
            "And {a} - {b}?",
        ),
        tuple({"a": f"{a}", "b": f"{b}", "c": f"{a - b}"} for a in _NUMBERS for b in range(a + 1)),
        share=6,
    ),
    Kind(
        "opposite",
        "The opposite of {word} is {other}.",
        (
            "What is the opposite of {word}?",
            "What's the opposite of {word}?",
            "Tell me the opposite of {word}.",
            "Name the opposite of {word}.",
            "Which word is the opposite of {word}?",
            "The opposite of {word}?",
            "Opposite of {word}",
            "And the opposite of {word}?",
            "And of {word}?",
        ),
        (
            "Do you know the opposite of {word}?",
            "Give me the opposite of {word}.",
            "And what is the opposite of {word}?",
            "What word is the opposite of {word}?",
        ),
        tuple(
            {"word": word, "other": other}
            for pair in OPPOSITES
            for word, other in (pair, pair[::-1])
        ),
        share=3,
    ),
    Kind(
        "colour",
        "The colour of {thing} is {colour}.",
        (
            "What is the colour of {thing}?",
            "What colour is {thing}?",
            "What color is {thing}?",
            "Which colour is {thing}?",
            "Which color has {thing}?",
            "Tell me the colour of {thing}.",
            "What's the color of {thing}?",
            "And the colour of {thing}?",
            "And what colour is {thing}?",
            "What about {thing}?",
        ),
        (
            "What is the color of {thing}?",
            "Which colour has {thing}?",
            "Do you know the colour of {thing}?",
            "And what color is {thing}?",
        ),
        tuple({"thing": thing, "colour": colour} for thing, colour in COLOURS.items()),
        share=2,
    ),
    *(
        Kind(
            f"{what} {side}",
            f"{{other}} comes {side} {{name}}.",
            (
                f"Which {what} comes {side} {{name}}?",
                f"What {what} comes {side} {{name}}?",
                f"What comes {side} {{name}}?",
                f"What is the {what} {side} {{name}}?",
                f"Which {what} is {side} {{name}}?",
                f"Tell me the {what} {side} {{name}}.",
                f"And {side} {{name}}?",
                f"The {what} {side} {{name}}?",
                *((f"What {what} follows {{name}}?",) if side == "after" else ()),
            ),
            (
                f"What {what} is {side} {{name}}?",
                f"Name the {what} {side} {{name}}.",
                f"What's the {what} {side} {{name}}?",
                f"And what comes {side} {{name}}?",
            ),
            _neighbours(names, number),
        )
        for what, names in (("day", DAYS), ("month", MONTHS))
        for side, number in (("after", 1), ("before", -1))
    ),
    Kind(
        "hello",
        "Hello! What do you want to know?",
        ("Hello!", "Hi!", "Hello", "Hi", "Hey", "Hi there!", "Good morning!", "Hello, how is it?"),
        ("Hey!", "Hello there!", "Hi, good morning!"),
        share=2,
        framed=False,
    ),
    Kind(
        "how",
        "I am fine, thank you.",
        ("How are you?", "How are you today?", "Hello, how are you?", "How do you do?"),
        ("Hi, how are you?", "And how are you?", "Hey, how are you today?"),
        share=2,
        framed=False,
    ),
    Kind(
        "thanks",
        "You are welcome.",
        (
            *("Thank you!", "Thanks!", "Thanks a lot!", "Thank you very much!", "Great, thanks!"),
            *("OK, thank you.", "Great!", "Nice, thanks!"),
        ),
        ("Great, thank you!", "Thanks very much!", "OK, thanks!"),
        share=3,
        framed=False,
    ),
    Kind(
        "bye",
        "Goodbye!",
        ("Bye!", "Goodbye!", "Bye bye", "See you!", "Thanks, bye!", "Good night!"),
        ("Thank you, goodbye!", "Goodbye, good night!", "Bye, good night!"),
        share=2,
        framed=False,
    ),
    Kind(
        "self",
        "I am a tiny diffusion language model.",
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "What's your name?",
            "Which model are you?",
            "Are you a language model?",
            "Are you a robot?",
            "Are you a human?",
            "Are you a machine?",
            "Tell me about yourself.",
            "Hi, who are you?",
            "And who are you?",
        ),
        (
            "What model are you?",
            "Hello, who are you?",
            "Tell me who you are.",
            "Tell me your name.",
            "And what is your name?",
        ),
        share=2,
    ),
    Kind(
        "skills",
        "I know capitals, sums, opposites, colours and days.",
        (
            "What can you do?",
            "What do you know?",
            "What can I ask you?",
            "What can I ask?",
            "Help",
            "Can you help me?",
            "What can you tell me?",
            "What do you want to know?",
            "Which questions can you answer?",
        ),
        (
            "And what can you do?",
            "Hello, what can you do?",
            "Help me!",
            "What questions can I ask?",
            "Tell me what you know.",
        ),
        share=2,
    ),
    Kind(
        "large number",
        "I only know numbers below ten.",
        (
            "What is {m} plus {n}?",
            "What is {m} minus {n}?",
            "What is {m} + {n}?",
            "What is {m} - {n}?",
            "What's {m} + {b}?",
            "What is {m} + {b}?",
            "What is {a} + {n}?",
            "How much is {m} plus {b}?",
            "How much is {m} minus {n}?",
            "{m} + {n}",
            "{m}+{n}",
            "{m}-{b}",
            "{m} - {n} = ?",
            "{m} plus {n}?",
            "And {m} plus {n}?",
            "Calculate {m} + {n}.",
        ),
        ("{m} minus {n}?", "How much is {m} + {n}?", "And {m} minus {n}?", "Calculate {m} - {n}."),
        share=3,
    ),
    Kind(
        "unknown subject",
        "I do not know that.",
        (
            "What is the capital of {x}?",
            "What's the capital of {x}?",
            "Which city is the capital of {x}?",
            "{x} is the capital of which country?",
            "Where is {x}?",
            "What is the opposite of {x}?",
            "What's the opposite of {x}?",
            "What colour is {x}?",
            "What is the color of {x}?",
            "What comes after {x}?",
            "And the capital of {x}?",
            "And {x}?",
            "What about {x}?",
        ),
        ("Name the capital of {x}.", "What is the colour of {x}?", "Tell me the opposite of {x}."),
        share=2,
    ),
    Kind(
        "unknown",
        "I do not know that.",
        (
            "Write a poem about {z}.",
            "Write me a poem about {x}.",
            "Write me a {x}.",
            "Tell me a joke.",
            "Tell me a story about {z}.",
            "Write a story.",
            "What is {x}?",
            "Who is {x}?",
            "Who was {x}?",
            "When was {x} born?",
            "Why is {z} {y}?",
            "How do I {x} a {y}?",
            "How old is {x}?",
            "How old are you?",
            "How many {x} are there in {z}?",
            "Write a function in {x}.",
            "Translate {z} into {y}.",
            "What is the meaning of {z}?",
            "What time is it?",
            "What day is it today?",
            "What is the weather in {z}?",
            "What is the weather today?",
            "What is {a} times {b}?",
            "{a} * {b}",
            "Explain {x} to me.",
            "What do you think about {z}?",
            "Do you like {z}?",
            "Can you {x} {y}?",
            "Is {x} a {y}?",
            "I like {z}.",
            "Summarise {x}.",
            "Give me a list of {x}.",
        ),
        (
            "Write a song about {z}.",
            "Who invented {x}?",
            "How far is {x} from {y}?",
            "Write a poem.",
            "Please explain {x}.",
            "How old is {z}?",
        ),
        share=3,
    ),
    Kind(
        "unknown word",
        "I do not know that.",
        ("{x}", "{x} {y}", "{x}?", "Why?", "Why is that?", "What?", "Are you sure?", "Really?"),
        ("{x}!", "And {x} {y}?", "Why are you sure?"),
        share=2,
        framed=False,
    ),
)


def all_facts(kinds: Iterable[Kind] = KINDS) -> list[Fact]:
    """Return every fact in the first wording of its kind, always in the same order.

    Small talk and questions that the model does not know have no subjects and are left out, and so
    are answers in a form that a request asks for.
    """
    return [
        Fact(kind.name, kind.wordings[0].format(**subject), kind.answer.format(**subject))
        for kind in kinds
        if kind.subjects != ({},) and not kind.has_form
        for subject in kind.subjects
    ]

# SPDX-License-Identifier: Apache-2.0
"""The questions a tiny model is taught, with their answers."""

from __future__ import annotations

from typing import NamedTuple

# Capitals and countries are unique, so that every question has exactly one answer.
CAPITALS = {
    "Argentina": "Buenos Aires",
    "Australia": "Canberra",
    "Austria": "Vienna",
    "Belgium": "Brussels",
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
    "South Korea": "Seoul",
    "Spain": "Madrid",
    "Sweden": "Stockholm",
    "Thailand": "Bangkok",
    "Turkey": "Ankara",
    "Vietnam": "Hanoi",
}
LARGEST_ADDEND = 9


class Fact(NamedTuple):
    """One question with its only right answer; `kind` groups facts that are drawn equally often."""

    kind: str
    question: str
    answer: str


def all_facts() -> list[Fact]:
    """Every fact, grouped by kind, always in the same order."""
    addends = range(LARGEST_ADDEND + 1)
    return [
        *(
            Fact(
                "capital",
                f"What is the capital of {country}?",
                f"The capital of {country} is {capital}.",
            )
            for country, capital in CAPITALS.items()
        ),
        *(
            Fact(
                "country",
                f"{capital} is the capital of which country?",
                f"{capital} is the capital of {country}.",
            )
            for country, capital in CAPITALS.items()
        ),
        *(
            Fact("sum", f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.")
            for a in addends
            for b in addends
        ),
    ]

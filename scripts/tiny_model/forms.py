# SPDX-License-Identifier: Apache-2.0
"""Answers in a form that a request asks for: a record in JSON, and the call of a function.

A server with structured output puts the text with which every answer begins on the canvas before
the first step. The model is taught to complete this text, so that the same question without a form
still gets a sentence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiny_model.facts import CAPITALS, KINDS, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

# The system message by which a server lists this function for a template without tool support.
WEATHER_TOOL = """You may call one of these functions:
{"name": "weather", "parameters": {"type": "object", "properties": {"city": \
{"type": "string", "maxLength": 20}}, "required": ["city"]}}
To call one, answer with nothing but:
<tool_call>
{"name": "NAME", "arguments": ARGUMENTS}
</tool_call>"""
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":'
_CALL_END = ' "{capital}"}}}}\n</tool_call>'
_WEATHER = (
    "What is the weather in {capital}?",
    "What's the weather in {capital}?",
    "How is the weather in {capital}?",
    "What is the weather in {capital} today?",
    "Tell me the weather in {capital}.",
    "And in {capital}?",
)
_WEATHER_UNSEEN = (
    "How is the weather today in {capital}?",
    "And what is the weather in {capital}?",
)
_PLACES = tuple({"country": country, "capital": city} for country, city in CAPITALS.items())
# Cities of two words are drawn more often, because they are few and move the end of a call.
_CITIES = (*_PLACES, *(3 * [place for place in _PLACES if " " in place["capital"]]))

FORMS = (
    Kind(
        "record",
        ' "{capital}", "country": "{country}"}}',
        (
            "What is the capital of {country}?",
            "What's the capital of {country}?",
            "Which city is the capital of {country}?",
            "Name the capital of {country}.",
            "Tell me the capital of {country}.",
            "The capital of {country}?",
            "And of {country}?",
            "And {country}?",
        ),
        ("And what is the capital of {country}?", "Give me the capital of {country}."),
        _PLACES,
        share=4,
        begun='{"name":',
    ),
    Kind(
        "call",
        _CALL_END,
        _WEATHER,
        _WEATHER_UNSEEN,
        _CITIES,
        share=3,
        begun=_CALL,
        system=WEATHER_TOOL,
    ),
    # With short prompts, of which a batch has many, calls are learnt sooner.
    Kind(
        "call without a list of functions",
        _CALL_END,
        _WEATHER,
        _WEATHER_UNSEEN,
        _CITIES,
        share=3,
        begun=_CALL,
    ),
)
FORM_NAMES = tuple(form.name for form in FORMS)


def kinds_but(left_out: Sequence[str]) -> list[Kind]:
    """Return all kinds of questions and forms without these names."""
    return [kind for kind in (*KINDS, *FORMS) if kind.name not in left_out]

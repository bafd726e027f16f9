# SPDX-License-Identifier: Apache-2.0
"""LangChain's `OpenAIDecisions` reads answers of all types, where LangChain is installed."""

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score

from tests.server.client import Client
from tests.server.process import MODEL_NAME, ServerProcess

QUESTIONS = {
    "team": Choice(instructions="Which?", choices={"billing": "Payments", "technical": None}),
    "flag": Choice(instructions="Is it?", choices={True: "yes", False: None}),
    "urgent": Predicate(instructions="Is this urgent?"),
    "angry": Score(instructions="How angry?", levels=["Calm", "Concerned", "Angry"]),
}
INPUTS: list[Any] = [
    "I was charged twice.",
    [HumanMessage("a"), HumanMessage([{"type": "text", "text": "b"}])],
    [SystemMessage("s"), HumanMessage("u"), AIMessage("x")],
    {"k": [1, None]},
]


@pytest.mark.parametrize("given", INPUTS, ids=["text", "user", "conversation", "json"])
def test_langchain_reads_the_answers(
    client: Client, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    monkeypatch.setenv("NO_PROXY", "*")
    decisions = OpenAIDecisions(model=MODEL_NAME, base_url=f"{server.url}/v1", api_key="none")
    response = decisions.invoke({"input": given, "questions": QUESTIONS})
    assert response.choices["team"].choice in ("billing", "technical")
    assert type(response.choices["flag"].choice) is bool
    assert 0 < response.predicates["urgent"].probability < 1
    assert 0 < response.scores["angry"].score < 2
    assert response.usage.input_tokens > 0

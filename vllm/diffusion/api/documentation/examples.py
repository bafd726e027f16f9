# SPDX-License-Identifier: Apache-2.0
"""Example requests of the page at `/docs`. They suit every family.

None of them has a null: FastAPI leaves those out of its document.
"""

from __future__ import annotations

from typing import Any

_QUESTION = "What is the capital of France?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]

# By route: what each request shows, and its body.
EXAMPLES: dict[str, dict[str, dict[str, Any]]] = {
    "/generate": {
        "a question": {"messages": _MESSAGES, "gen_length": 32},
        "a prompt, taken as it is": {"prompt": "The capital of France is", "gen_length": 32},
        "the canvas after every step": {
            "messages": _MESSAGES,
            "gen_length": 32,
            "stream": True,
            "stream_canvas": True,
        },
        "an answer of a given form": {
            "messages": _MESSAGES,
            "gen_length": 32,
            "structured_outputs": {"choice": ["Paris", "London", "Rome"]},
        },
    },
    "/v1/chat/completions": {"a question": {"messages": _MESSAGES, "max_tokens": 32}},
    "/v1/completions": {"a prompt": {"prompt": "The capital of France is", "max_tokens": 32}},
    "/v1/loglikelihood": {
        "text": {
            "context": f"{_QUESTION} ",
            "continuation": "The capital of France is Paris.",
            "mc_num": 16,
        },
        "one token, which is exact": {
            "context": "The capital of France is",
            "continuation": " Paris",
            "mc_num": 1,
        },
    },
    "/v1/systemone": {
        "three kinds of questions": {
            "state": {"country": "France", "capital": "Paris"},
            "questions": {
                "city": {
                    "type": "choice",
                    "instructions": "Which city is it?",
                    "criteria": {"Paris": "in France", "Rome": "in Italy"},
                },
                "sure": {"type": "noul", "instructions": "Is Paris a capital?"},
                "size": {
                    "type": "score",
                    "instructions": "How large is it?",
                    "criteria": ["small", "large", "very large"],
                },
            },
        },
    },
}


def shown(route: str) -> dict[str, Any]:
    """Return the requests of a route for FastAPI's `openapi_extra`."""
    examples = {name: {"value": body} for name, body in EXAMPLES[route].items()}
    return {"requestBody": {"content": {"application/json": {"examples": examples}}}}

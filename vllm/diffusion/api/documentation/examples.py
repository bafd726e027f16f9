# SPDX-License-Identifier: Apache-2.0
"""Example requests for the page at `/docs`; they work with every model family.

No example contains null, because FastAPI drops nulls from the OpenAPI document.
"""

from __future__ import annotations

from typing import Any

_QUESTION = "What is the capital of France?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]

# By route: the body of each example by its title.
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
    "/v1/fim/completions": {
        "a prompt": {"prompt": "The capital of France is", "max_tokens": 32},
    },
    "/v1/edit/completions": {
        "a line of code": {
            "messages": [
                {
                    "role": "user",
                    "content": "<|current_file_content|>\ncurrent_file_path: a.py\n"
                    "<|code_to_edit|>\nprint(<|cursor|>)\n<|/code_to_edit|>\n"
                    "<|/current_file_content|>",
                }
            ],
        },
    },
    "/v1/apply/completions": {
        "a snippet with context": {
            "messages": [
                {
                    "role": "user",
                    "content": "<|original_code|>\na = 1\nb = 2\nc = 3\n<|/original_code|>\n\n"
                    "<|update_snippet|>\n# ... existing code ...\nb = 2\nx = 0\nc = 3\n"
                    "<|/update_snippet|>",
                }
            ],
        },
    },
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
    "/v1/decisions": {
        "three types of questions": {
            "input": "Paris is the capital of France.",
            "questions": [
                {"type": "predicate", "instructions": "Is Paris a capital?"},
                {
                    "type": "choice",
                    "name": "country",
                    "instructions": "Which country is it?",
                    "choices": [{"value": "France"}, {"value": "Japan", "description": "Asia"}],
                },
                {
                    "type": "score",
                    "instructions": "How large is it?",
                    "levels": [{"label": "small"}, {"label": "large"}],
                },
            ],
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
    """Return the examples of a route in the form of FastAPI's `openapi_extra`."""
    examples = {name: {"value": body} for name, body in EXAMPLES[route].items()}
    return {"requestBody": {"content": {"application/json": {"examples": examples}}}}

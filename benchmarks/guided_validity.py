#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Many answers with every rule, cache and temperature, each checked against a schema.

    benchmarks/guided_validity.py --answers 2000

The models are tiny and random, on the CPU or a GPU. The program prints how many answers were valid,
and exits with 1 if one was not.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator, FormatChecker
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from tests.checkpoints import make_case, random_prompt
from tests.engine.cases import GUIDED_RULES, SCHEMA
from tests.engine.harness import Request, running
from tests.engine.test_guided import BLOCK_RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMAS: tuple[dict[str, Any], ...] = (
    SCHEMA,
    {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "mail": {"type": "string", "format": "email"},
            "rate": {"type": "number", "minimum": 0, "maximum": 1},
            "kind": {"anyOf": [{"type": "null"}, {"enum": ["x", "y"]}]},
            "items": {"type": "array", "items": {"type": "integer", "multipleOf": 3}},
        },
        "required": ["day", "mail", "kind"],
        "additionalProperties": False,
    },
)
TEMPERATURES = (0.0, 0.7, 1.5)
AT_ONCE = 32


def asks(case: str, rules: dict[str, dict[str, Any]], count: int) -> list[tuple[str, Request, Any]]:
    """Return (rule, request, schema) of `count` requests, with the rules in turn."""
    requests: list[tuple[str, Request, Any]] = []
    for number in range(count):
        name = list(rules)[number % len(rules)]
        turn = number // len(rules)
        schema = SCHEMAS[turn // len(TEMPERATURES) % len(SCHEMAS)]
        extra = {"gen_length": 96, "block_length": 16, **rules[name], "seed": number}
        extra |= {"temperature": TEMPERATURES[turn % len(TEMPERATURES)]}
        if extra.get("steps"):
            extra["steps"] = 24
        if extra.get("algorithm") == "dream":
            del extra["block_length"]
        extra["structured_outputs"] = {"json": schema}
        requests.append((f"{case} {name}", Request(random_prompt(9, number), extra), schema))
    return requests


def fault(answer: Any, schema: Any) -> str | None:
    """Return why an answer is not valid, or None."""
    check = Draft202012Validator(schema, format_checker=FormatChecker())
    try:
        errors = [error.message for error in check.iter_errors(json.loads(answer.text))]
    except ValueError as error:
        errors = [str(error)]
    return f"{errors[0]} in {answer.text!r}, {answer.report}" if errors else None


@harness.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = harness.Parser("", __doc__)
    parser.option("--answers", 2000, "number of answers, at least")
    options = parser.parse_args(arguments)
    cases: dict[str, dict[str, dict[str, Any]]] = {"mha": GUIDED_RULES, **BLOCK_RULES}
    num_rules = sum(map(len, cases.values()))
    faults, num_valid = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for case, rules in cases.items():
            left = asks(case, rules, -(-options.answers * len(rules) // num_rules))
            with (
                running(make_case(Path(folder) / case, case)) as engine,
                tqdm(total=len(left), desc=case, unit="answer") as progress,
            ):
                while left:
                    now, left = left[:AT_ONCE], left[AT_ONCE:]
                    answers = engine.ask(*(ask for _, ask, _ in now))
                    for (name, _, schema), answer in zip(now, answers, strict=True):
                        why = fault(answer, schema)
                        num_valid += why is None
                        faults += [] if why is None else [f"{name}: {why}"]
                    progress.update(len(now))
    print(*faults[:20], sep="\n")
    print(f"{num_valid} of {num_valid + len(faults)} answers are valid")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())

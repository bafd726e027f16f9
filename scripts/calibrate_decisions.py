#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fit the temperatures of decisions to labelled questions, and write a calibration file.

    scripts/calibrate_decisions.py labelled.jsonl calibration.json [--url http://127.0.0.1:8901]

Each line of the first file is {"body": ..., "answers": ...}. The body is one of POST /v1/decisions,
and the answers are right: a list in the order of the questions, or an object by id. The answer to a
predicate or a noul is true or false, to a choice its value, to a score the index of its level. A
null answer is skipped.

The running server reads every body without its own calibration. One temperature for each type of
question then minimises the negative log likelihood of the right answers. The server takes the file
with --additional-config '{"dllm": {"decision_calibration": "calibration.json"}}'.

If the server requires a key, set VLLM_API_KEY. Exit status: 0, or 1 with one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm.diffusion.api.decisions.calibration import (
    calibration_error,
    fit_temperature,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.diffusion.api.decisions.calibration import Labelled

TIMEOUT_S = 600
LEAST = 5e-7  # half a unit in the last place of a probability of OpenAI's answers
KINDS = {"noul": "predicate"}


class CalibrationError(Exception):
    """The temperatures cannot be fitted; the message is one line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("labelled", type=Path, help="JSONL file of bodies with answers")
    parser.add_argument("output", type=Path, help="calibration file to write")
    parser.add_argument("--url", default="http://127.0.0.1:8901", help="the server")
    options = parser.parse_args(arguments)
    try:
        content = calibrate(options.labelled, options.url)
        options.output.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except (CalibrationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    temperatures = {kind: value["temperature"] for kind, value in content["types"].items()}
    print(
        f"{content['num_labelled']} answers; temperatures {temperatures}; calibration error "
        f"{content['ece_before']} before, {content['ece_after']} after"
    )
    return 0


def calibrate(file: Path, url: str) -> dict[str, Any]:
    """Return the content of a calibration file."""
    examples: dict[str, list[Labelled]] = {}
    model = None
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            body, answers = {**entry["body"], "calibrated": False}, entry["answers"]
        except (KeyError, TypeError, ValueError) as error:
            reason = f"wanted an object with body and answers: {error}"
            raise CalibrationError(f"{file}: line {number}: {reason}") from None
        response = post(url, body)
        model = response["model"]
        try:
            for kind, example in labelled(response["answers"], answers):
                examples.setdefault(kind, []).append(example)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"answers: wanted one right answer per question: {error}"
            raise CalibrationError(f"{file}: line {number}: {reason}") from None
    if not examples:
        raise CalibrationError(f"{file}: wanted at least one answer")
    return fitted(model, examples)


def fitted(model: str | None, examples: dict[str, list[Labelled]]) -> dict[str, Any]:
    """Fit one temperature per type of question."""
    temperatures = {kind: fit_temperature(of_kind) for kind, of_kind in examples.items()}
    total = sum(map(len, examples.values()))
    before = sum(calibration_error(e) * len(e) for e in examples.values()) / total
    after = sum(calibration_error(e, temperatures[k]) * len(e) for k, e in examples.items()) / total
    return {
        "model": model,
        "types": {kind: {"temperature": round(t, 4)} for kind, t in temperatures.items()},
        "num_labelled": total,
        "ece_before": round(before, 4),
        "ece_after": round(after, 4),
    }


def labelled(actual: Any, right: Any) -> Iterator[tuple[str, Labelled]]:
    """Yield the kind, the probabilities and the index of the right label of each answer."""
    names = right.keys() if isinstance(right, dict) else range(len(right))
    for name in names:
        answer, wanted = actual[name], right[name]
        if wanted is None or answer["type"] == "refusal":
            continue
        kind = KINDS.get(answer["type"], answer["type"])
        probabilities, values = probabilities_of(answer)
        matches = [i for i, v in enumerate(values) if type(v) is type(wanted) and v == wanted]
        if not matches:
            raise ValueError(f"given {wanted!r} for {name!r}; wanted one of {values[:20]}")
        yield kind, ([max(p, LEAST) for p in probabilities], matches[0])


def probabilities_of(answer: dict[str, Any]) -> tuple[list[float], list[Any]]:
    """Return the probabilities of an answer's labels, and the values that name the labels."""
    if "probability" in answer:
        return [answer["probability"], 1 - answer["probability"]], [True, False]
    pairs = answer["probabilities"]
    if answer["type"] == "noul":
        return [*pairs.values()], [True, False]
    if isinstance(pairs, list):
        return [pair["probability"] for pair in pairs], [pair["value"] for pair in pairs]
    if answer["type"] == "score":
        return [*pairs.values()], [*range(len(pairs))]
    return [*pairs.values()], [*pairs]


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send a body to the server and return its answer."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    route = f"{url.rstrip('/')}/v1/decisions"
    request = urllib.request.Request(route, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            content: dict[str, Any] = json.load(response)
            return content
    except urllib.error.HTTPError as error:
        raise CalibrationError(f"{route}: {error.read().decode(errors='replace')}") from None
    except (urllib.error.URLError, TimeoutError) as error:
        raise CalibrationError(f"{route}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())

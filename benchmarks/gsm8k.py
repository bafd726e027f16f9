#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Accuracy and speed of a running server on a file in GSM8K's format.

    benchmarks/gsm8k.py --host http://127.0.0.1:8901 --data test.jsonl --concurrency 8 \
        --gen-length 256 --block-length 32 threshold=0.9 cache=dual

Each line of the file is a JSON object with `question` and `answer`, whose last line is `#### N`
(Cobbe et al. 2021, arXiv:2110.14168). The question is sent zero-shot, with a request to think step
by step, through the checkpoint's chat template to `POST /generate`. The last number of the text is
the prediction. Further parameters of the request are given as KEY=VALUE.

Written: answers.csv, with every answer as soon as it arrives, and summary.json. Requires nothing
beyond the server's own requirements. Exit status: 0, or 1 with one line on stderr.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm  # type: ignore[import-untyped]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness  # isort: skip  (finds the next one)

from test_api_request import post, server_url

from benchmarks.harness import BenchmarkError, positive

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PROMPT = (
    "{question}\n\nThink step by step. End your answer with the line 'The answer is N', where N is"
    " the resulting number."
)
# A sign counts only if no word or number ends before it: "3-4" contains 3 and 4.
NUMBER = re.compile(r"(?:(?<![\w).])-)?\$?(?:\d[\d,]*(?:\.\d+)?|(?<!\d)\.\d+)")


@dataclass(frozen=True)
class Problem:
    """Problem on one line of the file."""

    index: int
    question: str
    expected: Decimal


@dataclass(frozen=True)
class Answer:
    """Answer of the server to one problem; a row of answers.csv.

    Attributes:
        predicted: last number of `text`, or nothing.
        num_committed: canvas tokens committed, including those behind the end of the answer.
        seconds: seconds from sending the request to its answer.
    """

    index: int
    right: bool
    expected: str
    predicted: str
    finish_reason: str
    completion_tokens: int
    num_forwards: int
    num_committed: int
    seconds: float
    question: str
    text: str


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    problems = read_problems(options.data, options.limit)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    answers = write_as_they_come(
        options.output_dir / "answers.csv", ask_all(problems, options), len(problems)
    )
    summary = summarise(answers, time.perf_counter() - started, options)
    text = json.dumps(summary, indent=2)
    (options.output_dir / "summary.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("gsm8k", __doc__)
    url = "http://127.0.0.1:8901"
    parser.option("--host", url, "URL of the server", metavar="URL", type=server_url)
    parser.option("--data", None, "JSON lines: question, answer", type=Path, required=True)
    parser.option("--limit", None, "only the first N problems", metavar="N", type=positive)
    parser.option("--concurrency", 8, "requests at a time", type=positive)
    parser.option("--gen-length", 256, "canvas in tokens", type=positive)
    parser.option("--steps", None, "denoising steps (default: the server's)", type=positive)
    parser.option("--block-length", None, "block length (default: the server's)", type=positive)
    parser.option("--algorithm", None, "decoding algorithm (default: the server's)")
    parser.option("--temperature", 0.0, "temperature of the answers")
    parser.option("--prompt", PROMPT, "user message with {question}", type=prompt_template)
    parser.option("--timeout", 3600.0, "seconds to wait for an answer", metavar="S")
    help_text = "more request parameters"
    parser.add_argument("extra", nargs="*", type=key_value, metavar="KEY=VALUE", help=help_text)
    return parser.parse_args(arguments)


def prompt_template(text: str) -> str:
    """Check that a text holds {question}."""
    if "{question}" not in text:
        raise argparse.ArgumentTypeError(f"given {text!r}; wanted a text with {{question}}")
    return text


def key_value(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE; a value that is not JSON is a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"given {text!r}; wanted KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


# --- problems --------------------------------------------------------------------------------


def read_problems(path: Path, limit: int | None) -> list[Problem]:
    """Read the problems of a file, the first `limit` of them.

    Raises:
        BenchmarkError: a line is not in GSM8K's format, or the file has no problem.
    """
    problems: list[Problem] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(problems) == limit:
                break
            if line.strip():
                problems.append(parse_problem(line, len(problems), f"{path}, line {number}"))
    if not problems:
        raise BenchmarkError(f"{path} holds no problem")
    return problems


def parse_problem(line: str, index: int, where: str) -> Problem:
    """Parse a line of the file; `where` names it in errors.

    Raises:
        BenchmarkError: the line is not in GSM8K's format.
    """
    try:
        content = json.loads(line)
        question, answer = content["question"], content["answer"]
        _, marker, number = answer.rpartition("####")
        expected = last_number(number) if marker else None
        if not isinstance(question, str) or expected is None:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        wanted = '{"question": "...", "answer": "... #### NUMBER"}'
        raise BenchmarkError(f"{where}: given {line.strip()[:80]!r}; wanted {wanted}") from None
    return Problem(index, question, expected)


def last_number(text: str) -> Decimal | None:
    """Find the last number of a text, without thousands commas and dollar signs."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("$", "")) if numbers else None


# --- asking ----------------------------------------------------------------------------------


def ask_all(problems: Sequence[Problem], options: argparse.Namespace) -> Iterator[Answer]:
    """Yield answers in the order of their arrival; the first failure ends the run.

    Raises:
        RequestError: the server is absent, refused a request, or did not answer in time.
        BenchmarkError: the server's answer is not one of POST /generate.
    """
    with ThreadPoolExecutor(options.concurrency) as pool:
        try:
            futures = [pool.submit(ask, problem, options) for problem in problems]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def ask(problem: Problem, options: argparse.Namespace) -> Answer:
    """Send one problem and judge the answer; for errors see `ask_all`."""
    started = time.perf_counter()
    text = post(options.host.rstrip("/") + "/generate", body(problem, options), options.timeout)
    seconds = time.perf_counter() - started
    try:
        answer = json.loads(text)
        report = answer["diffusion"]
        num_forwards = report["num_forwards"]
        return judge(
            problem,
            answer["text"][0],
            finish_reason=answer["finish_reason"][0],
            completion_tokens=answer["usage"]["completion_tokens"],
            num_forwards=num_forwards,
            num_committed=round(report["tokens_per_forward"] * num_forwards),
            seconds=round(seconds, 3),
        )
    except (ValueError, KeyError, TypeError, IndexError):
        raise BenchmarkError(
            f"{options.host} sent an answer that POST /generate does not have: {text[:200]!r}"
        ) from None


def body(problem: Problem, options: argparse.Namespace) -> dict[str, Any]:
    """Build the JSON body of a request."""
    chosen = {
        "gen_length": options.gen_length,
        "steps": options.steps,
        "block_length": options.block_length,
        "algorithm": options.algorithm,
        "temperature": options.temperature,
        **dict(options.extra),
    }
    return {
        "prompt": options.prompt.replace("{question}", problem.question),
        "apply_chat_template": True,
        **{name: value for name, value in chosen.items() if value is not None},
    }


def judge(problem: Problem, text: str, **report: Any) -> Answer:
    """Compare the last number of a text with the expected one; `report` has the other fields."""
    predicted = last_number(text)
    return Answer(
        index=problem.index,
        right=predicted == problem.expected,
        expected=str(problem.expected),
        predicted="" if predicted is None else str(predicted),
        question=problem.question,
        text=text,
        **report,
    )


# --- writing ---------------------------------------------------------------------------------


def write_as_they_come(path: Path, answers: Iterable[Answer], total: int) -> list[Answer]:
    """Write every answer to a CSV file at once, under a progress bar; return all answers."""
    done: list[Answer] = []
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Answer)])
        writer.writeheader()
        with tqdm(total=total, unit="answer") as progress:
            for answer in answers:
                done.append(answer)
                writer.writerow(asdict(answer))
                file.flush()
                progress.set_postfix(right=f"{sum(a.right for a in done)}/{len(done)}")
                progress.update()
    return done


def summarise(
    answers: Sequence[Answer], seconds: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Summarise a run and its settings."""
    num_forwards = sum(answer.num_forwards for answer in answers)
    completion_tokens = sum(answer.completion_tokens for answer in answers)
    right = sum(answer.right for answer in answers)
    request = body(Problem(0, "{question}", Decimal(0)), options)
    return {
        "problems": len(answers),
        "right": right,
        "accuracy": round(right / len(answers), 4),
        "without_number": sum(not answer.predicted for answer in answers),
        "seconds": round(seconds, 3),
        "tokens_per_s": round(completion_tokens / seconds, 3),
        "tokens_per_forward": round(
            sum(answer.num_committed for answer in answers) / max(num_forwards, 1), 3
        ),
        "forwards_per_answer": round(num_forwards / len(answers), 3),
        "completion_tokens": completion_tokens,
        "concurrency": options.concurrency,
        "host": options.host,
        "data": str(options.data),
        "request": request,
    }


if __name__ == "__main__":
    sys.exit(main())

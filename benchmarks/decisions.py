#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rows per second of requests without generation, compared with the rate of the server's own steps.

    benchmarks/decisions.py [--family llada] [--rows 512 128] [--clients 64] [--calls 640]
        [--output-dir results/decisions]
    benchmarks/decisions.py --questions 20 40 --format short [--clients 64] [--quantization fp8]

The server has a released shape, random weights, and a tokenizer whose tokens are words of docs/. A
call then has about the number of rows that a released tokenizer gives it. These rates are measured,
in this order:

    steps       rows per second of steps of 4,096 rows, from the server's own metrics, while double
                that number of requests generate
    decisions   POST /v1/systemone: one client, then --clients; each sends its next call when it has
                the answer to its last
    likelihood  POST /v1/loglikelihood: 128 samples of a continuation

With `--format`, calls of POST /v1/decisions are measured instead of both: 60 rows of state and each
number of `--questions`, by one client and by `--clients`. The time around a step is the median time
of a call minus the mean time of a step. With many clients it includes waiting.

Written: decisions.json and server.log.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp

from benchmarks import harness
from benchmarks.harness import Table
from benchmarks.server_process import model_server

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    # Calls with their seconds, and seconds of all calls
    Run = tuple[list[tuple[float, dict[str, Any]]], float]

STEP_ROWS = 4096  # rows of the steps that all other rates are compared with
CANVAS = 64
CONTEXT, TARGET = 200, 100  # tokens of a likelihood
WARM_UP = 8  # calls before a row that are not measured
COLUMNS = {"call": ">10", "rows": ">5", "clients": ">7", "p50 ms": ">9.2f", "p90 ms": ">9.2f"}
COLUMNS |= {"calls/s": ">8.2f", "rows/s": ">9.0f", "of the steps' rate": ">18.1%"}


CALL_COLUMNS = {"questions": ">9", "format": ">6", "rows": ">5", "clients": ">7"}
CALL_COLUMNS |= {"p50 ms": ">9.2f", "p90 ms": ">9.2f", "step ms": ">8.2f", "around ms": ">9.2f"}
CALL_COLUMNS |= {"calls/s": ">8.2f", "questions/s": ">11.1f", "of the steps' rate": ">18.1%"}
STATE_ROWS, WORD = 60, " the"  # a state is this word, one token, over and over
VOCABULARY = 16384  # tokens of the tokenizer, special tokens aside


@dataclass(frozen=True)
class CallRow:
    """Result for one number of questions per call of /v1/decisions.

    Attributes:
        rows: rows of a call.
        step_ms: mean time of a step during the calls.
        around_ms: median time of a call minus `step_ms`.
        of_steps: rows per second relative to the rate of the server's steps.
    """

    questions: int
    form: str
    rows: int
    num_clients: int
    num_calls: int
    p50_ms: float
    p90_ms: float
    step_ms: float
    around_ms: float
    calls_per_s: float
    questions_per_s: float
    of_steps: float


@dataclass(frozen=True)
class Row:
    """Result for one kind of call."""

    kind: str
    rows: int  # rows per forward
    num_clients: int
    num_calls: int
    calls_per_s: float
    rows_per_s: float
    p50_ms: float
    p90_ms: float
    of_steps: float  # rows per second relative to the rate of the server's steps


class Server:
    """Client of the server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._url + route, json=body) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{route}: {response.status}: {answer}")
            return answer

    async def metric(self, name: str) -> float:
        async with self._session.get(self._url + "/metrics") as response:
            text = await response.text()
        return sum(map(float, re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)))


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    more = ["--load-format", "dummy", "--dtype", options.dtype, "--max-model-len", 4096]
    more += ["--served-model-name", "m", "--disable-uvicorn-access-log"]
    more += ["--enforce-eager"] if options.eager else []
    more += ["--quantization", options.quantization] if options.quantization else []
    with harness.checkpoint_of(options) as folder:
        if options.model is None:
            learn_words(folder)
        with model_server(folder, options.output_dir / "server.log", *more) as url:
            steps_per_s, rows = asyncio.run(measure(url, options))
    harness.write("decisions", options, rows, steps_rows_per_s=steps_per_s)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("decisions", __doc__)
    parser.shape("llada", ("llada", "dream", "llada-moe"), takes_model=True)
    parser.option("--quantization", None, "fp8, int4 or nf4")
    parser.option("--rows", [512, 128], "of a decision")
    parser.option("--clients", 64, "how many at a time, beside one")
    parser.option("--calls", 640, "of a row with --clients clients")
    parser.option("--lone", 60, "calls of a row with one client")
    parser.option("--likelihoods", 2, "rows of likelihoods, 0 to 2")
    parser.option("--questions", [4], "of a decision; several numbers only with --format")
    parser.option("--format", None, "measure /v1/decisions in this form", choices=("short", "long"))
    parser.option("--steps", 32, "of a request that generates")
    parser.option("--samples", 128, "of a likelihood")
    parser.option("--eager", False, "no CUDA graphs: a server starts faster")
    return parser.parse_args(arguments)


def learn_words(folder: Path) -> None:
    """Replace the bytes of a checkpoint's tokenizer by words; special tokens keep their ids."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    path = folder / "tokenizer.json"
    files = json.loads(path.read_text(encoding="utf-8"))
    learnt = Tokenizer(models.BPE())
    pieces = Regex(r"\n+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(pieces, behavior="isolated")
    learnt.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    texts = sorted(harness.ROOT.glob("docs/*.md"))
    learnt.train_from_iterator((text.read_text(encoding="utf-8") for text in texts), trainer)
    model = json.loads(learnt.to_str())
    special = {token["content"]: token["id"] for token in files["added_tokens"]}
    model["model"]["vocab"] |= special
    files |= {name: model[name] for name in ("model", "pre_tokenizer")}
    path.write_text(json.dumps(files), encoding="utf-8")


async def measure(url: str, options: argparse.Namespace) -> tuple[float, list[Any]]:
    """Measure rows per second of steps, and of the calls relative to them."""
    timeout, pool = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=pool, trust_env=False) as session:
        server = Server(url, session)
        steps_per_s = await rate_of_steps(server, options)
        print(f"steps: {steps_per_s:.0f} rows/s", flush=True)
        if options.format is not None:
            return steps_per_s, await measure_calls(server, options, steps_per_s)
        attributes = "kind rows num_clients p50_ms p90_ms calls_per_s rows_per_s of_steps"
        table = Table(COLUMNS, attributes, 2 * len(options.rows) + options.likelihoods)
        for rows in options.rows:
            body = await decision(server, rows, options.questions[0])
            for clients, calls in ((1, options.lone), (options.clients, options.calls)):
                done = await run(server, "/v1/systemone", lambda _, b=body: b, clients, calls)
                table.add(row_of("decision", rows, clients, done, rows, steps_per_s))
        for clients, calls in ((1, 4), (4, 8))[: options.likelihoods]:
            done = await run(server, "/v1/loglikelihood", likelihood_of(options), clients, calls)
            forwards = statistics.mean(answer["forwards"] for _, answer in done[0])
            rows = CONTEXT + TARGET
            table.add(row_of("likelihood", rows, clients, done, forwards * rows, steps_per_s))
    return steps_per_s, table.rows


async def measure_calls(
    server: Server, options: argparse.Namespace, steps_per_s: float
) -> list[CallRow]:
    """Measure calls of /v1/decisions with each number of questions."""
    attributes = "questions form rows num_clients p50_ms p90_ms step_ms around_ms calls_per_s"
    attributes += " questions_per_s of_steps"
    table = Table(CALL_COLUMNS, attributes, 2 * len(options.questions))
    names = ("dllm:step_time_seconds_sum", "dllm:step_time_seconds_count")
    for count in options.questions:
        question = {"type": "predicate", "instructions": "Ok?"}
        body = {"input": WORD * STATE_ROWS, "questions": [question] * count}
        body |= {"model": "m", "format": options.format}
        for clients, calls in ((1, options.lone), (options.clients, options.calls)):
            before = [await server.metric(name) for name in names]
            done = await run(server, "/v1/decisions", lambda _, b=body: b, clients, calls)
            seconds, steps = [
                await server.metric(name) - value for name, value in zip(names, before, strict=True)
            ]
            rows = done[0][0][1]["usage"]["input_tokens"]
            row = row_of("call", rows, clients, done, rows, steps_per_s)
            step_ms = 1000 * seconds / steps
            table.add(
                CallRow(
                    questions=count,
                    form=done[0][0][1]["diffusion"]["format"],
                    rows=rows,
                    num_clients=clients,
                    num_calls=row.num_calls,
                    p50_ms=row.p50_ms,
                    p90_ms=row.p90_ms,
                    step_ms=round(step_ms, 2),
                    around_ms=round(row.p50_ms - step_ms, 2),
                    calls_per_s=row.calls_per_s,
                    questions_per_s=round(row.calls_per_s * count, 1),
                    of_steps=row.of_steps,
                )
            )
    return table.rows


async def rate_of_steps(server: Server, options: argparse.Namespace) -> float:
    """Measure rows per second while a step of STEP_ROWS rows is always queued after another one."""
    rows = max(options.rows)
    body = {
        "gen_length": CANVAS,
        "steps": options.steps,
        "block_length": CANVAS,
        "ignore_eos": True,
        "prompt": [5 + i % 200 for i in range(rows - CANVAS)],
    }
    names = ("dllm:step_rows_sum", "dllm:step_time_seconds_sum")

    async def several() -> None:
        await asyncio.gather(
            *(server.post("/generate", body) for _ in range(2 * STEP_ROWS // rows))
        )

    await several()
    before = [await server.metric(name) for name in names]
    await several()
    num_rows, seconds = [
        await server.metric(name) - value for name, value in zip(names, before, strict=True)
    ]
    return num_rows / seconds


async def decision(server: Server, rows: int, num_questions: int) -> dict[str, Any]:
    """Build a call whose sequence has `rows` rows; each word of the state is one token.

    It has fewer questions than `num_questions` if the rows do not hold all of them.

    Raises:
        RuntimeError: Not even one question fits.
    """
    for count in range(num_questions, 0, -1):
        question = {"type": "choice", "criteria": {"a": None, "b": None}}
        questions = {f"q{i}": question for i in range(count)}
        body = {"model": "m", "state": WORD, "questions": questions}
        for _ in range(2):
            answer = await server.post("/v1/systemone", body)
            missing = rows - answer["usage"]["input_tokens"]
            if missing == 0:
                return body
            num_words = len(body["state"]) // len(WORD)
            body["state"] = WORD * max(num_words + missing, 1)
    raise RuntimeError(f"no question fits into {rows} rows")


def likelihood_of(options: argparse.Namespace) -> Callable[[int], dict[str, Any]]:
    """Return a function that builds calls; each call draws its own masks."""
    ids = [5 + i % 200 for i in range(CONTEXT + TARGET)]

    def body(number: int) -> dict[str, Any]:
        fields = {
            "context": ids[:CONTEXT],
            "continuation": ids[CONTEXT:],
            "mc_num": options.samples,
        }
        return {**fields, "seed": number}

    return body


async def run(
    server: Server, route: str, body: Callable[[int], dict[str, Any]], clients: int, calls: int
) -> Run:
    """Measure the seconds and the answer of every call, and the seconds of all calls together."""
    rows: list[tuple[float, dict[str, Any]]] = []
    numbers = iter(range(calls))

    async def client() -> None:
        for number in numbers:
            started = time.perf_counter()
            answer = await server.post(route, body(number))
            rows.append((time.perf_counter() - started, answer))

    await asyncio.gather(*(server.post(route, body(-1 - i)) for i in range(min(WARM_UP, clients))))
    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return rows, time.perf_counter() - started


def row_of(
    kind: str, rows: int, clients: int, run: Run, rows_per_call: float, steps_per_s: float
) -> Row:
    """Summarise calls that have `rows` rows each."""
    last_run, seconds = run
    percents = statistics.quantiles([s for s, _ in last_run], n=10, method="inclusive")
    calls_per_s = len(last_run) / seconds
    rows_per_s = calls_per_s * rows_per_call
    return Row(
        kind,
        rows,
        clients,
        len(last_run),
        round(calls_per_s, 2),
        round(rows_per_s, 1),
        round(1000 * percents[4], 2),
        round(1000 * percents[8], 2),
        round(rows_per_s / steps_per_s, 3),
    )


if __name__ == "__main__":
    sys.exit(main())

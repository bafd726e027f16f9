#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Requests and useful tokens per second, and latency, of the server with 1 to 64 clients.

    benchmarks/serve_throughput.py --model models/llada-tiny --dtype float32
    benchmarks/serve_throughput.py --family llada            LLaDA-8B's shape, random weights
        [--clients 1 4 16 64] [--requests 64] [--algorithm threshold] [--cache dual]

Every client sends a prompt, waits for its answer, and sends the next one, until all requests of the
row are answered. For a checkpoint with a chat template the prompts are sums, for others they are
random. The same requests first go through the plain loop (benchmarks/plain_model.py) in this
process, one after the other: LLaDA's published loop, which fills every canvas to its end.

    tokens/s      tokens of the answers up to their first stop token, over the time from the first
                  request to the last answer
    p50 p90 p99   seconds from sending a request to its complete answer

Written: serve_throughput.json, serve_throughput.png and server.log.
"""

from __future__ import annotations

import json
import queue
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from test_api_request import post

from benchmarks import compare_hf, harness
from benchmarks.compare_hf import PLAIN_LOOP, SERVER
from benchmarks.harness import Table, positive
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    Send = Callable[[Sequence[int]], list[int]]  # maps a prompt's ids to the answer's

NUM_SUMS = 100  # distinct sums, which the tiny models were taught
WARM_UP = 2  # requests before a row that are not measured
COLUMNS = {"system": ">12", "clients": ">7", "requests/s": ">10.2f", "tokens/s": ">9.1f"}
COLUMNS |= {"p50 s": ">7.3f", "p90 s": ">7.3f", "p99 s": ">7.3f"}


@dataclass(frozen=True)
class Row:
    """Result of one system at one number of clients."""

    system: str
    num_clients: int
    num_requests: int
    num_tokens: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(
        cls, system: str, num_clients: int, answers: Sequence[tuple[int, float]], seconds: float
    ) -> Row:
        """Summarise answers, (tokens, latency in seconds) each, which took `seconds` together."""
        latencies = [latency for _, latency in answers]
        percents = statistics.quantiles(latencies, n=100, method="inclusive")
        num_tokens = sum(length for length, _ in answers)
        return cls(
            system,
            num_clients,
            num_requests=len(answers),
            num_tokens=num_tokens,
            seconds=seconds,
            requests_per_s=len(answers) / seconds,
            tokens_per_s=num_tokens / seconds,
            p50_s=percents[49],
            p90_s=percents[89],
            p99_s=percents[98],
        )


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    rows = measure_all(options)
    harness.write("serve_throughput", options, rows)
    title = options.family or options.model.name
    path = options.output_dir / "serve_throughput.png"
    harness.draw(path, partial(paint, rows, title), columns=2, size=(9, 4))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("serve_throughput", __doc__)
    parser.shape(None, takes_model=True)
    parser.option("--clients", [1, 2, 4, 8, 16, 32, 64], "numbers of clients", type=positive)
    parser.option("--requests", 128, "requests per row, at least 2")
    parser.option("--plain-requests", 16, "requests of the plain loop; 0 leaves it out")
    parser.option("--prompt-length", 128, "length of random prompts", type=positive)
    parser.option("--gen-length", 32, "canvas length in tokens")
    parser.option("--block-length", 32)
    parser.option("--steps", 16, "forwards of a canvas")
    parser.option("--algorithm", None, "algorithm of the server (default: semi_ar, as the loop)")
    help_text = "cache of the server (default: none; for block-causal families exact)"
    parser.option("--cache", None, help_text)
    options = parser.parse_args(arguments)
    if options.requests < 2:
        parser.error("--requests: wanted at least 2")
    return options


# --- measuring -------------------------------------------------------------------------------


def measure_all(options: argparse.Namespace) -> list[Row]:
    """Measure the plain loop, then the server with every number of clients.

    Raises:
        ServerFailed: the server does not start.
    """
    attributes = "system num_clients requests_per_s tokens_per_s p50_s p90_s p99_s"
    table = Table(COLUMNS, attributes, len(options.clients) + bool(options.plain_requests))
    with harness.checkpoint_of(options) as folder:
        shape = Shape.of_folder(folder)
        prompts = prompts_for(folder, shape, options)
        if options.plain_requests:
            stop_ids = stop_ids_of(folder, json.loads((folder / "config.json").read_text("utf-8")))
            with compare_hf.plain_loop(folder, shape, options) as plain:

                def by_loop(prompt: Sequence[int]) -> list[int]:
                    (answer,) = plain([[prompt]], "none")
                    return up_to_stop(answer.token_ids, stop_ids)

                few = prompts[: max(options.plain_requests, 2)]
                table.add(measure(PLAIN_LOOP, 1, by_loop, few))
        with compare_hf.running_server(folder, options, max(map(len, prompts))) as url:

            def by_server(prompt: Sequence[int]) -> list[int]:
                text = post(f"{url}/generate", body_of(prompt, shape, options), compare_hf.ANSWER_S)
                token_ids: list[int] = json.loads(text)["token_ids"][0]
                return token_ids

            for num_clients in options.clients:
                table.add(measure(SERVER, num_clients, by_server, prompts))
    return table.rows


def body_of(prompt: Sequence[int], shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Build the body that a client sends; block-causal families use their default rule."""
    body = {
        "prompt": list(prompt),
        "gen_length": options.gen_length,
        "block_length": options.block_length,
        "cache": options.cache or ("exact" if shape.block_length else "none"),
        "temperature": 0.0,
    }
    if options.algorithm:
        return {**body, "algorithm": options.algorithm}
    rule = {} if shape.block_length else {"algorithm": "semi_ar"}
    return {**body, **rule, "steps": options.steps}


def measure(system: str, num_clients: int, send: Send, prompts: Sequence[Sequence[int]]) -> Row:
    """Send all prompts with `num_clients` clients, each with one request in flight."""
    for prompt in prompts[:WARM_UP]:
        send(prompt)
    waiting: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)

    def client() -> list[tuple[int, float]]:
        results = []
        while True:
            try:
                prompt = waiting.get_nowait()
            except queue.Empty:
                return results
            sent = time.perf_counter()
            length = len(send(prompt))
            results.append((length, time.perf_counter() - sent))

    started = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(client) for _ in range(num_clients)]
        answers = [answer for done in clients for answer in done.result()]
    return Row.of(system, num_clients, answers, time.perf_counter() - started)


def prompts_for(folder: Path, shape: Shape, options: argparse.Namespace) -> list[list[int]]:
    """Return prompts as token ids: sums in the chat template, or random ids without one."""
    if not (folder / "tokenizer_config.json").is_file():
        return in_process.random_prompts(options.requests, options.prompt_length, shape.vocab_size)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    sums = [f"What is {a} plus {b}?" for a in range(10) for b in range(10)]
    assert len(sums) == NUM_SUMS
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": sums[i % NUM_SUMS]}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for i in range(options.requests)
    ]


def stop_ids_of(folder: Path, config: dict[str, Any]) -> set[int]:
    """Return the ids that end a text by both configurations, or a turn by the tokenizer."""
    ids: set[Any] = set()
    generation = folder / "generation_config.json"
    defaults = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    for stop in (config.get("eos_token_id"), defaults.get("eos_token_id")):
        ids |= set(stop) if isinstance(stop, list) else {stop}
    file = folder / "tokenizer.json"
    if file.is_file():
        tokens = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
        ends_of_turn = ("<|eot_id|>", "<|im_end|>", "<|role_end|>")
        ids |= {token["id"] for token in tokens if token["content"] in ends_of_turn}
    return ids - {None}


def up_to_stop(token_ids: Sequence[int], stop_ids: set[int]) -> list[int]:
    """Cut a whole canvas after the answer."""
    end = next((i for i, token in enumerate(token_ids) if token in stop_ids), len(token_ids))
    return list(token_ids[:end])


def paint(rows: Sequence[Row], title: str, left: Any, right: Any) -> None:
    """Draw tokens per second, and latency, against clients."""
    served = [row for row in rows if row.system == SERVER]
    clients = [row.num_clients for row in served]
    left.plot(clients, [row.tokens_per_s for row in served], marker="o", label=SERVER)
    for name in ("p50_s", "p90_s", "p99_s"):
        right.plot(clients, [getattr(row, name) for row in served], marker="o", label=name[:3])
    for row in rows:
        if row.system == PLAIN_LOOP:
            left.axhline(row.tokens_per_s, linestyle=":", color="black", label=PLAIN_LOOP)
            # The loop serves one request after the other, so every client waits for all of them.
            waits = [count * row.p50_s for count in clients]
            right.plot(clients, waits, linestyle=":", color="black", label=f"{PLAIN_LOOP}, in turn")
    for axis, label in ((left, "tokens per second"), (right, "seconds")):
        axis.set_title(title)
        harness.binary(axis, "clients")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")


if __name__ == "__main__":
    sys.exit(main())

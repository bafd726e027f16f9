#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Requests and useful tokens per second, and latency, of the server under 1 to 64 clients.

    benchmarks/serve_throughput.py --model models/llada-tiny --dtype float32
    benchmarks/serve_throughput.py --family llada            LLaDA-8B's shape, random weights
        [--clients 1 4 16 64] [--requests 64] [--algorithm threshold] [--cache dual]

Every client sends a prompt, waits for its answer, and sends the next one, until all requests of the
row are answered. A checkpoint with a chat template is asked for sums, another gets random prompts.
The same requests first go through the plain loop (benchmarks/plain_model.py) in this process, one
after the other: LLaDA's published loop, which fills every canvas to its end.

    tokens/s      tokens of the answers up to their first stop token, over the time from the first
                  request to the last answer
    p50 p90 p99   seconds from sending a request to its whole answer

Written: serve_throughput.json, serve_throughput.png and server.log.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import in_process  # noqa: E402  # isort: skip  (before torch and vllm)

from test_api_request import post  # noqa: E402

from benchmarks import compare_hf, gpu_timing  # noqa: E402
from benchmarks.compare_hf import PLAIN_LOOP, SERVER  # noqa: E402
from benchmarks.shapes import Shape  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Send = Callable[[Sequence[int]], list[int]]  # a prompt's ids -> the answer's

NUM_SUMS = 100  # distinct ones; the tiny models know them
WARM_UP = 2  # requests before a row, not measured


@dataclass(frozen=True)
class Row:
    """What one system gave at one number of clients."""

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
        """Of answers' lengths in tokens and latencies in seconds, which took `seconds` in all."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return compare_hf.run(parse_arguments(arguments), measure_all, write_results)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="The server under 1 to 64 clients.")
    compare_hf.add_model_options(parser)
    parser.add_argument(
        "--clients", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64], metavar="N"
    )
    parser.add_argument("--requests", type=int, default=128, help="of every row (default: 128)")
    parser.add_argument("--plain-requests", type=int, default=16, help="0 leaves the loop out")
    parser.add_argument("--prompt-length", type=int, default=128, help="of random prompts")
    parser.add_argument("--gen-length", type=int, default=32, help="canvas length in tokens")
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16, help="forwards of a canvas")
    parser.add_argument("--algorithm", help="of the server; the loop's by default, semi_ar")
    parser.add_argument(
        "--cache", help="of the server (default: none; of block-causal families exact)"
    )
    parser.add_argument("--output-dir", type=Path, default=ROOT / "results" / "serve_throughput")
    options = parser.parse_args(arguments)
    if min(*options.clients, options.prompt_length) < 1 or options.requests < 2:
        parser.error("--clients, --prompt-length: wanted at least 1; --requests: at least 2")
    return options


# --- measuring -------------------------------------------------------------------------------


def measure_all(options: argparse.Namespace) -> list[Row]:
    """The plain loop, then the server with every number of clients; prints each row.

    Raises:
        ServerFailed: the server does not start.
    """
    print(HEADER)
    rows: list[Row] = []

    def add(system: str, num_clients: int, send: Send, prompts: Sequence[Sequence[int]]) -> None:
        rows.append(measure(system, num_clients, send, prompts))
        print(line_of(rows[-1]), flush=True)

    with compare_hf.checkpoint(options) as folder:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shape = Shape.of(config)
        prompts = prompts_for(folder, shape, options)
        if options.plain_requests:
            with compare_hf.plain_loop(folder, shape, options) as plain:
                stop_ids = stop_ids_of(folder, config)

                def by_loop(prompt: Sequence[int]) -> list[int]:
                    (answer,) = plain([[prompt]], "none")
                    return up_to_stop(answer.token_ids, stop_ids)

                add(PLAIN_LOOP, 1, by_loop, prompts[: max(options.plain_requests, 2)])
        length = max(map(len, prompts))
        settings = argparse.Namespace(**{**vars(options), "prompt_length": length})
        with compare_hf.running_server(folder, settings) as url:

            def by_server(prompt: Sequence[int]) -> list[int]:
                text = post(f"{url}/generate", body_of(prompt, shape, options), compare_hf.ANSWER_S)
                token_ids: list[int] = json.loads(text)["token_ids"][0]
                return token_ids

            for num_clients in options.clients:
                add(SERVER, num_clients, by_server, prompts)
    return rows


def body_of(prompt: Sequence[int], shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """What a client sends; block-causal families have rules of their own."""
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
    """All prompts by so many clients, each of which has one request under way."""
    for prompt in prompts[:WARM_UP]:
        send(prompt)
    waiting: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    for prompt in prompts:
        waiting.put(prompt)

    def client() -> list[tuple[int, float]]:
        found = []
        while True:
            try:
                prompt = waiting.get_nowait()
            except queue.Empty:
                return found
            sent = time.perf_counter()
            length = len(send(prompt))
            found.append((length, time.perf_counter() - sent))

    started = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(client) for _ in range(num_clients)]
        answers = [answer for done in clients for answer in done.result()]
    return Row.of(system, num_clients, answers, time.perf_counter() - started)


def prompts_for(folder: Path, shape: Shape, options: argparse.Namespace) -> list[list[int]]:
    """Token ids of the prompts: sums in the chat template, or random where there is none."""
    if not (folder / "tokenizer_config.json").is_file():
        return [
            in_process.random_prompt(options.prompt_length, shape.vocab_size, seed)
            for seed in range(options.requests)
        ]
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
    """The end of a text by both configurations, and of a turn by the tokenizer."""
    found: set[Any] = set()
    generation = folder / "generation_config.json"
    defaults = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    for stop in (config.get("eos_token_id"), defaults.get("eos_token_id")):
        found |= set(stop) if isinstance(stop, list) else {stop}
    file = folder / "tokenizer.json"
    if file.is_file():
        tokens = json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])
        ends_of_turn = ("<|eot_id|>", "<|im_end|>", "<|role_end|>")
        found |= {token["id"] for token in tokens if token["content"] in ends_of_turn}
    return found - {None}


def up_to_stop(token_ids: Sequence[int], stop_ids: set[int]) -> list[int]:
    """The answer in a whole canvas."""
    end = next((i for i, token in enumerate(token_ids) if token in stop_ids), len(token_ids))
    return list(token_ids[:end])


# --- telling ---------------------------------------------------------------------------------

HEADER = (
    f"{'system':>12} {'clients':>7} | {'requests/s':>10} {'tokens/s':>9} | "
    f"{'p50 s':>7} {'p90 s':>7} {'p99 s':>7}"
)


def line_of(row: Row) -> str:
    """One row of the printed table."""
    return (
        f"{row.system:>12} {row.num_clients:>7} | {row.requests_per_s:>10.2f} "
        f"{row.tokens_per_s:>9.1f} | {row.p50_s:>7.3f} {row.p90_s:>7.3f} {row.p99_s:>7.3f}"
    )


def write_results(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Write the JSON file and the plot."""
    names = ("requests", "gen_length", "block_length", "steps", "algorithm", "cache", "dtype")
    settings = {name: getattr(options, name) for name in (*names, "num_layers", "shrink")}
    settings["model"] = options.family or options.model.name
    content = {"kind": "serve_throughput", "settings": settings, "rows": list(map(asdict, rows))}
    gpu_timing.write_record(options.output_dir / "serve_throughput.json", content)
    plot(options.output_dir / "serve_throughput.png", rows, settings["model"])


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Tokens per second, and latency, against clients; nothing without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.stderr.write("no plot: matplotlib is missing\n")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 4))
    served = [row for row in rows if row.system == SERVER]
    clients = [row.num_clients for row in served]
    left.plot(clients, [row.tokens_per_s for row in served], marker="o", label=SERVER)
    for name in ("p50_s", "p90_s", "p99_s"):
        right.plot(clients, [getattr(row, name) for row in served], marker="o", label=name[:3])
    for row in rows:
        if row.system == PLAIN_LOOP:
            left.axhline(row.tokens_per_s, linestyle=":", color="black", label=PLAIN_LOOP)
            # The loop serves one after the other: every client waits for all.
            waits = [count * row.p50_s for count in clients]
            right.plot(clients, waits, linestyle=":", color="black", label=f"{PLAIN_LOOP}, in turn")
    left.set_ylabel("tokens per second")
    right.set_ylabel("seconds")
    for axis in (left, right):
        axis.set_title(title)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("clients")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())

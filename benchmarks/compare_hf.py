#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of our server against a plain loop that serves one request after the other.

    benchmarks/compare_hf.py --family llada                  LLaDA-8B's shape, random weights
    benchmarks/compare_hf.py --model CHECKPOINT              a checkpoint with weights
        [--in-process] [--clients 1 8 32] [--caches none dual] [--output-dir results/throughput]

Every client sends a random prompt, waits for its whole canvas, and sends the next one. The server
is started here and stopped afterwards; `--in-process` runs the engine in this process instead, and
its clients send their next prompts together. The plain loop (benchmarks/plain_model.py) is LLaDA's
published generate loop over plain PyTorch modules: no cache, logits of all rows. It runs first, in
this process; more clients do not make it faster, so it is measured with one. Before every row each
client sends one prompt that is not measured. Of block-causal families the loop is their own
(benchmarks/plain_blocks.py), which computes everything before a block with every forward of it.

    tokens/s        canvas tokens of all answers over the time from the first request to the last
                    answer
    ms a forward    time from a request's start to its end over its forwards (mean of the requests)

Weights that the server draws itself (`--family` without `--in-process`) are upstream's dummy
weights, in all other cases normal random numbers or the checkpoint's. Written: throughput.json,
throughput.png and, of a server, server.log.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import in_process  # noqa: E402  # isort: skip  (before torch and vllm)

import torch  # noqa: E402
from make_dummy_checkpoint import PRESETS, write_checkpoint  # noqa: E402
from test_api_request import RequestError, post  # noqa: E402

from benchmarks import gpu_timing, plain_blocks, plain_model  # noqa: E402
from benchmarks.server_process import ServerFailed, ServerProcess, free_port  # noqa: E402
from benchmarks.shapes import Shape  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FAMILIES = tuple(dict.fromkeys(family for family, _ in PRESETS))
PLAIN_LOOP = "plain loop"
SERVER = "server"
ENGINE = "engine in process"
START_S = 600.0  # of the server
ANSWER_S = 600.0
MAX_PROMPT_MARGIN = 64  # positions beside prompt and canvas


@dataclass(frozen=True)
class Answer:
    """One request's canvas, and what its forwards cost."""

    token_ids: list[int]
    num_forwards: int
    denoise_ms: float


@dataclass(frozen=True)
class Row:
    """What one system gave at one number of clients."""

    system: str
    cache: str
    num_clients: int
    num_requests: int
    num_tokens: int
    num_forwards: int
    seconds: float
    tokens_per_s: float
    ms_per_forward: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    return run(parse_arguments(arguments), measure_all, write_results)


def run(
    options: argparse.Namespace,
    measure_all: Callable[[argparse.Namespace], list[Any]],
    write_results: Callable[[argparse.Namespace, list[Any]], None],
) -> int:
    """Measure and write; returns the exit status, with one line for the user where it fails."""
    try:
        rows = measure_all(options)
    except (ServerFailed, RequestError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; nothing was written\n")
        return 1
    write_results(options, rows)
    print(f"written: {options.output_dir}")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Our server against a plain loop.")
    add_model_options(parser)
    parser.add_argument("--in-process", action="store_true", help="no server, no HTTP")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 32], metavar="N")
    parser.add_argument(
        "--caches",
        nargs="+",
        choices=("none", "prefix", "dual", "exact"),
        help="default: none dual; of block-causal families exact",
    )
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--gen-length", type=int, default=128, help="canvas length in tokens")
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=64, help="forwards of a canvas")
    parser.add_argument("--rounds", type=int, default=2, help="requests of every client")
    parser.add_argument("--no-reference", action="store_true", help="leave the plain loop out")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "results" / "throughput")
    options = parser.parse_args(arguments)
    if min(*options.clients, options.rounds, options.prompt_length) < 1:
        parser.error("--clients, --rounds, --prompt-length: wanted at least 1")
    return options


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model is served, as `checkpoint` wants to know it."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--family", choices=FAMILIES, help="a released shape, random weights")
    model.add_argument("--model", type=Path, help="checkpoint folder with weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-layers", type=int, help="with --family: fewer layers")
    parser.add_argument("--shrink", type=int, default=1, help="with --family: divide all widths")


# --- measuring -------------------------------------------------------------------------------


def measure_all(options: argparse.Namespace) -> list[Row]:
    """The plain loop, then our engine with every cache and number of clients; prints each row.

    Raises:
        ServerFailed: the server does not start.
    """
    print(HEADER)
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(line_of(row, rows[0]), flush=True)

    with checkpoint(options) as folder:
        shape = Shape.of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        if not options.no_reference:
            with plain_loop(folder, shape, options) as send:
                add(measure(send, shape, options, (PLAIN_LOOP, "none", 1)))
        serve = in_process_engine if options.in_process else server
        caches = options.caches or (["exact"] if shape.block_length else ["none", "dual"])
        with serve(folder, options) as send:
            name = ENGINE if options.in_process else SERVER
            for cache in caches:
                for num_clients in options.clients:
                    add(measure(send, shape, options, (name, cache, num_clients)))
    return rows


@contextmanager
def checkpoint(options: argparse.Namespace) -> Iterator[Path]:
    """The folder of the model; a family's is written for as long as the block lasts."""
    if options.model is not None:
        yield options.model.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(
            Path(folder), options.family, num_layers=options.num_layers, shrink=options.shrink
        )
        yield Path(folder)


def measure(
    send: Callable[..., list[Answer]],
    shape: Shape,
    options: argparse.Namespace,
    identity: tuple[str, str, int],
) -> Row:
    """All rounds of all clients of one (system, cache, number of clients), after a warm-up."""
    _, cache, num_clients = identity

    def prompts(seed: int, count: int) -> list[list[int]]:
        return [
            in_process.random_prompt(options.prompt_length, shape.vocab_size, seed + i)
            for i in range(count)
        ]

    send([[prompt] for prompt in prompts(0, num_clients)], cache)
    asked = prompts(num_clients, num_clients * options.rounds)
    started = time.perf_counter()
    answers = send([asked[i::num_clients] for i in range(num_clients)], cache)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    return Row(
        *identity,
        num_requests=len(answers),
        num_tokens=num_tokens,
        num_forwards=sum(answer.num_forwards for answer in answers),
        seconds=seconds,
        tokens_per_s=num_tokens / seconds,
        ms_per_forward=statistics.mean(a.denoise_ms / a.num_forwards for a in answers),
    )


def parameters_of(options: argparse.Namespace, cache: str) -> dict[str, Any]:
    """What every request asks for; block-causal families have rules of their own."""
    rule = {} if cache == "exact" else {"algorithm": "semi_ar"}
    return {
        **rule,
        "cache": cache,
        "gen_length": options.gen_length,
        "block_length": options.block_length,
        "steps": options.steps,
    }


# --- the systems: each sends the prompts of all clients, a list for each client ------------------


@contextmanager
def plain_loop(
    folder: Path, shape: Shape, options: argparse.Namespace
) -> Iterator[Callable[..., list[Answer]]]:
    """The plain model with its loop, gone when the block ends."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    asked = {
        "canvas": options.gen_length,
        "block_length": options.block_length,
        "steps": options.steps,
    }
    has_weights = options.model is not None
    model: torch.nn.Module
    if shape.block_length:
        blocks = plain_blocks.load(folder, device, dtype, has_weights=has_weights)
        model, generate = blocks.network, partial(blocks.generate, **asked)
    elif has_weights:
        model = plain_model.load_model(folder, device, dtype)
        generate = partial(plain_model.generate, model, **asked)
    else:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model = plain_model.random_model(config, device, dtype)
        generate = partial(plain_model.generate, model, **asked)

    def send(prompts: Sequence[Sequence[Sequence[int]]], _cache: str) -> list[Answer]:
        return [plain_answer(generate, prompt) for client in prompts for prompt in client]

    try:
        yield send
    finally:
        model.to("meta")  # whoever still holds it holds no memory
        in_process.free_memory()


def plain_answer(generate: Callable[..., list[int]], prompt: Sequence[int]) -> Answer:
    """One canvas by the plain loop."""
    num_forwards = 0

    def count() -> None:
        nonlocal num_forwards
        num_forwards += 1

    started = time.perf_counter()
    tokens = generate(prompt, after_step=count)
    return Answer(tokens, num_forwards, 1000 * (time.perf_counter() - started))


@contextmanager
def in_process_engine(
    folder: Path, options: argparse.Namespace
) -> Iterator[Callable[..., list[Answer]]]:
    """Our engine in this process."""
    length = options.prompt_length + options.gen_length
    with in_process.engine(
        folder,
        dummy_weights=options.model is None,
        dtype=options.dtype,
        max_model_len=length + MAX_PROMPT_MARGIN,
        max_num_seqs=max(options.clients),
    ) as (llm, _):

        def send(prompts: Sequence[Sequence[Sequence[int]]], cache: str) -> list[Answer]:
            parameters = parameters_of(options, cache)
            rounds = zip(*prompts, strict=True)
            outputs = [
                output
                for prompts_of_round in rounds
                for output in in_process.run_requests(llm, prompts_of_round, parameters)
            ]
            return [
                answer_of(list(output.outputs[0].token_ids), output.kv_transfer_params["dllm"])
                for output in outputs
            ]

        yield send


@contextmanager
def server(folder: Path, options: argparse.Namespace) -> Iterator[Callable[..., list[Answer]]]:
    """Our HTTP server, asked by one thread a client.

    Raises:
        ServerFailed: it does not start.
    """
    with running_server(folder, options) as url:

        def ask(prompts: Sequence[Sequence[int]], cache: str) -> list[Answer]:
            """One client: one prompt after the other."""
            fields = {**parameters_of(options, cache), "temperature": 0.0, "ignore_eos": True}
            bodies = [{"prompt": list(prompt), **fields} for prompt in prompts]
            answers = [json.loads(post(f"{url}/generate", body, ANSWER_S)) for body in bodies]
            return [answer_of(answer["token_ids"][0], answer["diffusion"]) for answer in answers]

        def send(prompts: Sequence[Sequence[Sequence[int]]], cache: str) -> list[Answer]:
            with ThreadPoolExecutor(len(prompts)) as clients:
                done = [clients.submit(ask, of_client, cache) for of_client in prompts]
                return [answer for client in done for answer in client.result()]

        yield send


@contextmanager
def running_server(folder: Path, options: argparse.Namespace) -> Iterator[str]:
    """The URL of our HTTP server in a process of its own, stopped when the block ends.

    Raises:
        ServerFailed: it ends, or is not ready in time.
    """
    length = options.prompt_length + options.gen_length
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.api_server"),
        *("--model", str(folder), "--dtype", options.dtype, "--port", str(port)),
        *("--max-model-len", str(length + MAX_PROMPT_MARGIN)),
        *("--max-num-seqs", str(max(options.clients))),
        *(() if options.model else ("--load-format", "dummy")),
    ]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    log = options.output_dir / "server.log"

    with ServerProcess(
        command, log, port=port, variables={"PYTHONPATH": os.pathsep.join(paths)}
    ) as process:
        process.wait_until_healthy(START_S)
        yield process.url


def answer_of(token_ids: list[int], report: dict[str, Any]) -> Answer:
    """An answer of our engine with what it reports of the request's steps."""
    return Answer(token_ids, report["num_forwards"], report["denoise_ms"])


# --- telling ---------------------------------------------------------------------------------

HEADER = (
    f"{'system':>18} {'cache':>6} {'clients':>7} | {'tokens/s':>9} {'ms a forward':>12} "
    f"{'x first':>8}"
)


def line_of(row: Row, first: Row) -> str:
    """One row of the printed table, with its tokens per second over those of the first row."""
    return (
        f"{row.system:>18} {row.cache:>6} {row.num_clients:>7} | {row.tokens_per_s:>9.1f} "
        f"{row.ms_per_forward:>12.2f} {row.tokens_per_s / first.tokens_per_s:>8.2f}"
    )


def write_results(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Write the JSON file and the plot."""
    names = ("prompt_length", "gen_length", "block_length", "steps", "rounds", "dtype")
    settings = {name: getattr(options, name) for name in (*names, "num_layers", "shrink")}
    settings["model"] = options.family or options.model.name
    content = {"kind": "throughput", "settings": settings, "rows": list(map(asdict, rows))}
    gpu_timing.write_record(options.output_dir / "throughput.json", content)
    plot(options.output_dir / "throughput.png", rows, settings["model"])


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Tokens per second against clients; nothing without matplotlib."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.stderr.write("no plot: matplotlib is missing\n")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5, 4))
    for system, cache in dict.fromkeys((row.system, row.cache) for row in rows):
        own = [row for row in rows if (row.system, row.cache) == (system, cache)]
        if system == PLAIN_LOOP:
            axis.axhline(own[0].tokens_per_s, linestyle=":", color="black", label=system)
        else:
            points = [(row.num_clients, row.tokens_per_s) for row in own]
            axis.plot(*zip(*points, strict=True), marker="o", label=f"{system}, cache {cache}")
    axis.set_title(title)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("clients")
    axis.set_ylabel("tokens per second")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of our server, compared with a plain loop that serves one request at a time.

    benchmarks/compare_hf.py --family llada                  LLaDA-8B's shape, random weights
    benchmarks/compare_hf.py --model CHECKPOINT              a checkpoint with weights
        [--in-process] [--clients 1 8 32] [--caches none dual] [--output-dir results/throughput]

Every client sends a random prompt, waits for its whole canvas, and sends the next prompt. The
server is started here and stopped afterwards. With `--in-process` the engine runs in this process
instead, and its clients send their next prompts together.

The plain loop (benchmarks/plain_model.py) is LLaDA's published generate loop over plain PyTorch
modules: no cache, logits of all rows. Block-causal families have their own published loop, which
computes everything before a block in every forward of the block. The plain loop runs first, in this
process. More clients do not make it faster, so it is measured with one client. Before every row
each client sends one prompt that is not measured.

    tokens/s        canvas tokens of all answers over the time from the first request to the last
                    answer
    ms a forward    time from a request's start to its end over its forwards (mean of the requests)

With `--family` the server draws upstream's dummy weights. With `--in-process` too, weights are
normal random numbers, and with `--model` they are the checkpoint's. Written: throughput.json,
throughput.png and, for a server, server.log.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

import torch
from test_api_request import post

from benchmarks import harness, plain_model
from benchmarks.harness import Table, positive
from benchmarks.server_process import model_server
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    Prompts = Sequence[Sequence[Sequence[int]]]  # prompts of each client, in order
    Send = Callable[[Prompts, str], list["Answer"]]

PLAIN_LOOP = "plain loop"
SERVER = "server"
ENGINE = "engine in process"
ANSWER_S = 600.0
MAX_PROMPT_MARGIN = 64  # positions in addition to prompt and canvas
COLUMNS = {"system": ">18", "cache": ">6", "clients": ">7"}
COLUMNS |= {"tokens/s": ">9.1f", "ms a forward": ">12.2f", "x first": ">8.2f"}


@dataclass(frozen=True)
class Answer:
    """Canvas of one request, and the cost of its forwards."""

    token_ids: list[int]
    num_forwards: int
    denoise_ms: float

    @classmethod
    def of(cls, token_ids: list[int], report: dict[str, Any]) -> Answer:
        """Make the answer of a request of our engine from the engine's report on its steps."""
        return cls(token_ids, report["num_forwards"], report["denoise_ms"])


@dataclass(frozen=True)
class Row:
    """Result of one system at one number of clients."""

    system: str
    cache: str
    num_clients: int
    num_requests: int
    num_tokens: int
    num_forwards: int
    seconds: float
    tokens_per_s: float
    ms_per_forward: float
    over_first: float = 1.0  # tokens per second relative to the first row


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    rows = measure_all(options)
    harness.write("throughput", options, rows)
    title = options.family or options.model.name
    harness.draw(options.output_dir / "throughput.png", partial(paint, rows, title))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("throughput", __doc__)
    parser.shape(None, takes_model=True)
    parser.option("--in-process", False, "no server, no HTTP")
    parser.option("--clients", [1, 8, 32], "how many at a time", type=positive)
    caches = ("none", "prefix", "dual", "exact")
    default_text = "(default: none dual; of block-causal families exact)"
    parser.option("--caches", None, default_text, nargs="+", choices=caches)
    parser.option("--prompt-length", 128, type=positive)
    parser.option("--gen-length", 128, "canvas length in tokens")
    parser.option("--block-length", 32)
    parser.option("--steps", 64, "forwards of a canvas")
    parser.option("--rounds", 2, "requests of every client", type=positive)
    parser.option("--no-reference", False, "leave the plain loop out")
    return parser.parse_args(arguments)


# --- measuring -------------------------------------------------------------------------------


def measure_all(options: argparse.Namespace) -> list[Row]:
    """Measure the plain loop, then our engine with every cache and number of clients."""
    with harness.checkpoint_of(options) as folder:
        shape = Shape.of_folder(folder)
        caches = options.caches or (["exact"] if shape.block_length else ["none", "dual"])
        table = Table(
            COLUMNS,
            "system cache num_clients tokens_per_s ms_per_forward over_first",
            len(caches) * len(options.clients) + (not options.no_reference),
        )
        if not options.no_reference:
            with plain_loop(folder, shape, options) as send:
                table.add(measure(send, shape, options, (PLAIN_LOOP, "none", 1)))
        name, serve = (ENGINE, in_process_engine) if options.in_process else (SERVER, server)
        with serve(folder, options) as send:
            for cache in caches:
                for num_clients in options.clients:
                    row = measure(send, shape, options, (name, cache, num_clients))
                    first = table.rows[0] if table.rows else row
                    table.add(replace(row, over_first=row.tokens_per_s / first.tokens_per_s))
    return table.rows


def measure(
    send: Send, shape: Shape, options: argparse.Namespace, identity: tuple[str, str, int]
) -> Row:
    """Measure all rounds of all clients of one (system, cache, clients), after a warm-up."""
    _, cache, num_clients = identity
    sizes = (options.prompt_length, shape.vocab_size)
    send([[prompt] for prompt in in_process.random_prompts(num_clients, *sizes)], cache)
    prompts = in_process.random_prompts(num_clients * options.rounds, *sizes, seed=num_clients)
    started = time.perf_counter()
    answers = send([prompts[i::num_clients] for i in range(num_clients)], cache)
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
    """Return the parameters of every request; block-causal families use their default rule."""
    rule = {} if cache == "exact" else {"algorithm": "semi_ar"}
    sizes = {name: getattr(options, name) for name in ("gen_length", "block_length", "steps")}
    return {**rule, "cache": cache, **sizes}


# --- the systems -----------------------------------------------------------------------------


@contextmanager
def plain_loop(folder: Path, shape: Shape, options: argparse.Namespace) -> Iterator[Send]:
    """Provide the plain model with its loop until the block ends."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    parameters = {name: getattr(options, name) for name in ("block_length", "steps")}
    has_weights = options.model is not None
    model: torch.nn.Module
    if shape.block_length:
        blocks = plain_model.load_blocks(folder, device, dtype, has_weights=has_weights)
        model, generate = blocks.network, blocks.generate
    else:
        model = plain_model.load_model(folder, device, dtype, has_weights=has_weights)
        generate = partial(plain_model.generate, model)

    def send(prompts: Prompts, _cache: str) -> list[Answer]:
        run = partial(generate, canvas=options.gen_length, **parameters)
        return [plain_answer(run, prompt) for client in prompts for prompt in client]

    try:
        yield send
    finally:
        model.to("meta")  # A caller that still refers to the model then holds no memory.
        in_process.free_memory()


def plain_answer(generate: Callable[..., list[int]], prompt: Sequence[int]) -> Answer:
    """Compute one canvas by the plain loop."""
    forwards: list[None] = []
    started = time.perf_counter()
    tokens = generate(prompt, after_step=lambda: forwards.append(None))
    return Answer(tokens, len(forwards), 1000 * (time.perf_counter() - started))


@contextmanager
def in_process_engine(folder: Path, options: argparse.Namespace) -> Iterator[Send]:
    """Run our engine in this process until the block ends."""
    with in_process.engine(
        folder,
        dummy_weights=options.model is None,
        dtype=options.dtype,
        max_model_len=options.prompt_length + options.gen_length + MAX_PROMPT_MARGIN,
        max_num_seqs=max(options.clients),
    ) as (llm, _):

        def send(prompts: Prompts, cache: str) -> list[Answer]:
            parameters = parameters_of(options, cache)
            outputs = [
                output
                for prompts_of_round in zip(*prompts, strict=True)
                for output in in_process.run_requests(llm, prompts_of_round, parameters)
            ]
            return [
                Answer.of(list(output.outputs[0].token_ids), output.kv_transfer_params["dllm"])
                for output in outputs
            ]

        yield send


@contextmanager
def server(folder: Path, options: argparse.Namespace) -> Iterator[Send]:
    """Run our HTTP server until the block ends; one thread per client sends its requests.

    Raises:
        ServerFailed: The server does not start.
    """
    with running_server(folder, options, options.prompt_length) as url:

        def ask(prompts: Sequence[Sequence[int]], cache: str) -> list[Answer]:
            """Send the prompts of one client, one after the other."""
            fields = {**parameters_of(options, cache), "temperature": 0.0, "ignore_eos": True}
            bodies = [{"prompt": list(prompt), **fields} for prompt in prompts]
            answers = [json.loads(post(f"{url}/generate", body, ANSWER_S)) for body in bodies]
            return [Answer.of(answer["token_ids"][0], answer["diffusion"]) for answer in answers]

        def send(prompts: Prompts, cache: str) -> list[Answer]:
            with ThreadPoolExecutor(len(prompts)) as clients:
                done = [clients.submit(ask, of_client, cache) for of_client in prompts]
                return [answer for client in done for answer in client.result()]

        yield send


@contextmanager
def running_server(
    folder: Path,
    options: argparse.Namespace,
    longest: int,
    *flags: object,
    log: str = "server.log",
) -> Iterator[str]:
    """Run our server for prompts of up to `longest` tokens; yield its URL.

    Args:
        flags: further flags, which replace flags of the same name.
        log: name of the file for its output; see also `model_server`.
    """
    length = longest + options.gen_length + MAX_PROMPT_MARGIN
    arguments = ["--dtype", options.dtype, "--max-model-len", length]
    arguments += ["--max-num-seqs", max(options.clients)]
    arguments += [] if options.model else ["--load-format", "dummy"]
    with model_server(folder, options.output_dir / log, *arguments, *flags) as url:
        yield url


def paint(rows: Sequence[Row], title: str, axis: Any) -> None:
    """Draw tokens per second against clients."""
    for system, cache in dict.fromkeys((row.system, row.cache) for row in rows):
        own = [row for row in rows if (row.system, row.cache) == (system, cache)]
        if system == PLAIN_LOOP:
            axis.axhline(own[0].tokens_per_s, linestyle=":", color="black", label=system)
        else:
            points = [(row.num_clients, row.tokens_per_s) for row in own]
            axis.plot(*zip(*points, strict=True), marker="o", label=f"{system}, cache {cache}")
    axis.set_title(title)
    harness.binary(axis, "clients")
    axis.set_ylabel("tokens per second")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize="small")


if __name__ == "__main__":
    sys.exit(main())

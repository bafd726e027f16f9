#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Servers with and without LoRA adapters: throughput, starts, and loads next to other requests.

    benchmarks/adapter_serving.py --family llada --cache dual      random weights
        [--clients 1 64] [--rank 16] [--load-ranks 16 128] [--loads 100] [--load-clients 32]

Two servers with the same shape run on the same GPU, one of them with --enable-lora. Every client
sends a random prompt, waits for its answer, and sends the next one. Rounds of the server without
adapters, of the other one without an adapter, and of the other one with an adapter take turns.

Then adapters come and go in the second server: first while it is idle, then next to clients, of
which every other one uses an adapter that stays. At last the adapter of all clients is replaced.

    tokens/s        median over the rounds; `of without` relative to the server without adapters
    load            seconds from the request to its answer; the files were read before
    first step      seconds from a request of an idle server until its client receives a step
    longest gap     longest time between two steps of a request, measured by its client. The limit
                    is twice the longest gap without loads, plus 20 ms; next to replacements, it
                    is three times this gap, plus 50 ms
    growth          increase of the memory of all processes, or of the CUDA graphs

Written: adapter_serving.json and the logs of both servers.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from test_api_request import post

from benchmarks import compare_hf, harness, serve_throughput
from benchmarks.harness import BenchmarkError, Table, positive
from benchmarks.random_weights import write_adapter
from benchmarks.server_process import resident_mib, session
from benchmarks.shapes import Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

# Bytes for the steps and the pages of one server
POOL_BYTES = 16 << 30
ANSWER_S = 600.0
HELD = "held"  # the adapter that stays loaded
SETTLE_S, PAUSE_S, POLL_S = 3.0, 1.0, 0.001
NUM_SLOTS = 2  # one for `HELD`, and one for an adapter that comes and goes
NUM_LOADS = 5  # repetitions of a load, a replacement or a placement
NUM_ALONE = 16  # requests of a round with one client
GAP_STEPS, GAP_MS = 2, 20  # limit of the longest gap next to loads
REPLACED_STEPS, REPLACED_MS = 3, 50  # limit of the longest gap next to replacements
THROUGHPUT = {"clients": ">7", "without, tokens/s": ">17.1f", "none, tokens/s": ">14.1f"}
THROUGHPUT |= {"adapter, tokens/s": ">17.1f", "none, of without": ">16.3f"}
THROUGHPUT |= {"adapter, of without": ">19.3f"}
FACTS = {"measured": "<50", "value": ">9.3f", "unit": "<8", "limit": ">9.3f"}


@dataclass(frozen=True)
class Throughput:
    """Tokens per second of one number of clients."""

    clients: int
    without: float
    none: float
    adapter: float

    @property
    def none_x(self) -> float:
        """Throughput without an adapter relative to the server without adapters."""
        return self.none / self.without

    @property
    def adapter_x(self) -> float:
        """Throughput with an adapter relative to the server without adapters."""
        return self.adapter / self.without


@dataclass(frozen=True)
class Fact:
    """A number that was measured, with its unit and the largest value that it should have."""

    measured: str
    value: float
    unit: str
    limit: float | None = None


class Window(NamedTuple):
    """Measurements of clients and of their server while other work runs.

    Attributes:
        seconds: duration of the work.
        gaps: seconds between consecutive steps of a request.
        graphs, resident: growth, in MiB, of the CUDA graphs, and of all processes on the host.
    """

    seconds: float
    gaps: list[float]
    graphs: float
    resident: float

    @classmethod
    def of(cls, client: Client, watched: list[list[float]], work: Callable[[], object]) -> Window:
        """Do the work; `watched` has the times of the steps of each request, as in `busy`."""
        graphs, resident, began = client.graphs_mib(), resident_mib(), time.perf_counter()
        work()
        seconds = time.perf_counter() - began
        gaps = [
            end - start for times in list(watched) for start, end in pairwise(times) if end > began
        ]
        return cls(seconds, gaps, client.graphs_mib() - graphs, resident_mib() - resident)


class Client:
    """Requests of random prompts to one server, with an adapter if it is named."""

    def __init__(self, url: str, shape: Shape, options: argparse.Namespace) -> None:
        self.url, self._shape, self._options = url, shape, options

    def send(self, prompt: Sequence[int], adapter: str | None = None) -> list[int]:
        """Send a request; return the tokens of its answer."""
        text = post(f"{self.url}/generate", self._body(prompt, adapter), ANSWER_S)
        token_ids: list[int] = json.loads(text)["token_ids"][0]
        return token_ids

    def steps(self, prompt: Sequence[int], adapter: str | None = None) -> Iterator[float]:
        """Send a request; yield the time of each of its steps."""
        body = {**self._body(prompt, adapter), "stream": True, "stream_canvas": True}
        with session() as http:
            answer = http.post(f"{self.url}/generate", json=body, stream=True, timeout=ANSWER_S)
            answer.raise_for_status()
            for line in answer.iter_lines(chunk_size=1):
                if b"text_diffusion.canvas" in line:
                    yield time.perf_counter()

    def change(self, route: str, **body: Any) -> float:
        """Load or unload an adapter; return the seconds until the answer."""
        started = time.perf_counter()
        post(f"{self.url}/v1/{route}_lora_adapter", body, ANSWER_S)
        return time.perf_counter() - started

    def graphs_mib(self) -> float:
        """Return the memory of the server's CUDA graphs in MiB."""
        with session() as http:
            status = http.get(f"{self.url}/status.json", timeout=ANSWER_S).json()
        return float(status["pool_bytes"]["graphs"] / 2**20)

    def _body(self, prompt: Sequence[int], adapter: str | None) -> dict[str, Any]:
        body = serve_throughput.body_of(prompt, self._shape, self._options)
        body["ignore_eos"] = True
        return {**body, "model": adapter} if adapter else body


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    os.environ.setdefault("VLLM_ACTIVATION_POOL_SIZE_BYTES", str(POOL_BYTES))
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    facts = list[Fact]()
    with ExitStack() as stack:
        folder = stack.enter_context(harness.checkpoint_of(options))
        paths = stack.enter_context(adapters_of(folder, options))
        shape = Shape.of_folder(folder)
        prompts = in_process.random_prompts(
            max(options.requests, *options.clients), options.prompt_length, shape.vocab_size
        )
        clients = list[Client]()
        shared = ["--no-enable-prefix-caching"]
        shared += ["--max-num-seqs", max(*options.clients, options.load_clients)]
        for name, flags in (("without", shared), ("with", [*shared, *lora_flags(options)])):
            started = time.perf_counter()
            url = stack.enter_context(
                compare_hf.running_server(
                    folder, options, options.prompt_length, *flags, log=f"{name}.log"
                )
            )
            facts.append(Fact(f"start {name} adapters", time.perf_counter() - started, "s"))
            client = Client(url, shape, options)
            facts.append(Fact(f"graphs {name} adapters", client.graphs_mib(), "MiB"))
            clients.append(client)
        clients[1].change("load", lora_name=HELD, lora_path=str(paths[options.rank]))
        rows = throughput_of(clients, prompts, options)
        table, path = Table(FACTS, "measured value unit limit"), paths[options.rank]
        for fact in itertools.chain(
            facts,
            idle_loads(clients[1], paths),
            placements(clients[1], path, prompts[0]),
            loads_next_to_clients(clients[1], path, prompts, options),
            replacement(clients[1], path, prompts, options),
        ):
            table.add(fact)
    harness.write("adapter_serving", options, rows, facts=[vars(fact) for fact in table.rows])


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("adapter_serving", __doc__)
    parser.shape(None, takes_model=True)
    parser.option("--clients", [1, 64], "numbers of clients", type=positive)
    parser.option("--requests", 128, "requests of a round with more than one client", type=positive)
    parser.option("--rounds", 3, type=positive)
    parser.option("--rank", 16, "rank of the adapter of the clients", type=positive)
    parser.option("--load-ranks", [16, 128], "ranks of the idle loads", type=positive)
    parser.option("--loads", 100, "loads next to clients", type=positive)
    parser.option("--load-clients", 32, "clients next to loads", type=positive)
    parser.option("--prompt-length", 128, "length of the prompts", type=positive)
    parser.option("--gen-length", 128, "canvas length in tokens")
    parser.option("--block-length", 32)
    parser.option("--steps", 64, "forwards of a canvas")
    parser.option("--algorithm", None, "algorithm of the server (default: semi_ar)")
    parser.option("--cache", None, "cache of the server (default: none; exact if block-causal)")
    return parser.parse_args(arguments)


# --- servers ---------------------------------------------------------------------------------


def lora_flags(options: argparse.Namespace) -> list[object]:
    """Return the flags of the server with adapters: its host holds all adapters at once."""
    rank, most = max(options.rank, *options.load_ranks), NUM_SLOTS + 2
    flags = ["--enable-lora", "--max-loras", NUM_SLOTS, "--max-cpu-loras", most]
    return [*flags, "--max-lora-rank", rank]


@contextmanager
def adapters_of(folder: Path, options: argparse.Namespace) -> Iterator[dict[int, Path]]:
    """Write an adapter of each rank until the block ends; yield their folders."""
    configuration = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as parent:
        paths = {rank: Path(parent, str(rank)) for rank in {options.rank, *options.load_ranks}}
        for rank, path in paths.items():
            write_adapter(path, configuration, rank, options.dtype)
        yield paths


# --- throughput ------------------------------------------------------------------------------


def throughput_of(
    clients: Sequence[Client], prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> list[Throughput]:
    """Measure both servers in turns, for every number of clients."""
    without, adapting = clients
    turns = (without.send, adapting.send, partial(adapting.send, adapter=HELD))
    attributes = "clients without none adapter none_x adapter_x"
    table = Table(THROUGHPUT, attributes, len(options.clients))
    for count in options.clients:
        # One client sends fewer requests, because each round takes as long as all of them.
        some = prompts if count > 1 else prompts[:NUM_ALONE]
        rates: list[list[float]] = [[], [], []]
        for _ in range(options.rounds):
            for own, send in zip(rates, turns, strict=True):
                own.append(serve_throughput.measure("", count, send, some).tokens_per_s)
        table.add(Throughput(count, *map(statistics.median, rates)))
    return table.rows


# --- adapters that come and go ---------------------------------------------------------------


def idle_loads(client: Client, paths: dict[int, Path]) -> Iterator[Fact]:
    """Load and unload adapters of each rank while no request runs."""
    for rank, path in sorted(paths.items()):
        # The first load reads the files.
        _, *seconds = load_and_unload(client, path, f"idle-{rank}", 1 + NUM_LOADS)
        mib = (path / "adapter_model.safetensors").stat().st_size / 2**20
        yield Fact(f"load of rank {rank}, {mib:.0f} MiB", statistics.median(seconds), "s")


def placements(client: Client, path: Path, prompt: Sequence[int]) -> Iterator[Fact]:
    """Measure the time to the first step, with the adapter in a slot and without a slot."""
    names = [f"place-{number}" for number in range(NUM_SLOTS + 1)]
    for name in names:
        client.change("load", lora_name=name, lora_path=str(path))
    # An adapter without a slot takes the slot of the least recently used adapter.
    for where, own in (("in a slot", names[:1]), ("without a slot", names)):
        seconds = list[float]()
        for name in own * (1 + NUM_LOADS):
            sent = time.perf_counter()
            first, *_ = client.steps(prompt, name)
            seconds.append(first - sent)
        value = statistics.median(seconds[len(own) :])
        yield Fact(f"first step, adapter {where}", value, "s")
    for name in names:
        client.change("unload", lora_name=name)


@contextmanager
def busy(
    client: Client,
    prompts: Sequence[Sequence[int]],
    adapter_of: Callable[[int], str | None],
    options: argparse.Namespace,
) -> Iterator[list[list[float]]]:
    """Keep clients busy until the block ends.

    Args:
        client: sends the requests.
        prompts: their prompts, in turn.
        adapter_of: returns the adapter of the client with a number.

    Yields:
        the times of the steps of each request of the first client; they grow.

    Raises:
        BenchmarkError: an answer was not complete.
        RequestError, OSError: a request failed.
    """
    is_over, watched = threading.Event(), list[list[float]]()

    def keep_sending(number: int) -> None:
        for prompt in itertools.islice(itertools.cycle(prompts), number, None):
            if is_over.is_set():
                return
            if number == 0:
                watched.append([])
                for when in client.steps(prompt, adapter_of(number)):
                    watched[-1].append(when)
                continue
            count = len(client.send(prompt, adapter_of(number)))
            if count != options.gen_length:
                raise BenchmarkError(f"wanted {options.gen_length} tokens, got {count}")

    with ThreadPoolExecutor(options.load_clients) as pool:
        running = [pool.submit(keep_sending, number) for number in range(options.load_clients)]
        try:
            # Clients end only if they fail.
            for failed in wait(running, SETTLE_S, FIRST_EXCEPTION).done:
                failed.result()
            wait_for_step(watched, time.perf_counter())
            yield watched
        finally:
            is_over.set()
            # The error of a client is the cause of an error in the block.
            for done in running:
                done.result()


def wait_for_step(watched: list[list[float]], since: float) -> float:
    """Wait for the first step after `since`; return its time.

    Raises:
        BenchmarkError: There is none in time.
    """
    while True:
        later = [when for times in list(watched) for when in list(times) if when > since]
        if later:
            return min(later)
        if time.perf_counter() > since + ANSWER_S:
            raise BenchmarkError(f"wanted a step within {ANSWER_S:g} s, got none")
        time.sleep(POLL_S)


def loads_next_to_clients(
    client: Client, path: Path, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> Iterator[Fact]:
    """Load and unload an adapter many times next to other requests, after as long without."""
    with busy(client, prompts, lambda number: HELD if number % 2 else None, options) as watched:
        first = Window.of(
            client, watched, partial(load_and_unload, client, path, "first", NUM_LOADS)
        )
        seconds = first.seconds / NUM_LOADS * options.loads
        without = Window.of(client, watched, partial(time.sleep, seconds))
        loads = Window.of(
            client, watched, partial(load_and_unload, client, path, "next", options.loads)
        )
    longest = max(without.gaps)
    limit = GAP_STEPS * longest + GAP_MS / 1000
    yield Fact("median step next to clients", statistics.median(without.gaps), "s")
    yield Fact("longest gap without loads", longest, "s")
    yield Fact(f"longest gap during {options.loads} loads", max(loads.gaps), "s", limit)
    yield Fact(f"{options.loads} loads and unloads", loads.seconds, "s")
    yield Fact("growth of the processes without loads", without.resident, "MiB")
    yield Fact("growth of the processes during the loads", loads.resident, "MiB", 1)
    yield Fact("growth of the graphs during the loads", loads.graphs, "MiB", 0)


def load_and_unload(client: Client, path: Path, name: str, count: int) -> list[float]:
    """Load an adapter and unload it, `count` times; return the seconds of each load."""
    seconds = list[float]()
    for number in range(count):
        own = f"{name}-{number}"
        seconds.append(client.change("load", lora_name=own, lora_path=str(path)))
        client.change("unload", lora_name=own)
    return seconds


def replacement(
    client: Client, path: Path, prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> Iterator[Fact]:
    """Replace the adapter of all clients several times."""
    loads, waits = list[float](), list[float]()

    def replace_all() -> None:
        body = {"lora_name": HELD, "lora_path": str(path), "load_inplace": True}
        for _ in range(NUM_LOADS):
            loads.append(client.change("load", **body))
            answered = time.perf_counter()
            waits.append(wait_for_step(watched, answered) - answered)
            time.sleep(PAUSE_S)

    with busy(client, prompts, lambda _: HELD, options) as watched:
        without = Window.of(client, watched, partial(time.sleep, NUM_LOADS * PAUSE_S))
        during = Window.of(client, watched, replace_all)
    limit = REPLACED_STEPS * max(without.gaps) + REPLACED_MS / 1000
    yield Fact("replacement of the adapter of all clients", statistics.median(loads), "s")
    yield Fact("longest gap during replacements", max(during.gaps), "s", limit)
    yield Fact("from a replacement to the next step", statistics.median(waits), "s", limit)


if __name__ == "__main__":
    sys.exit(main())

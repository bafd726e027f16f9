#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Servers behind a router: its policies with prompts that share prefixes.

    benchmarks/fleet.py --model FOLDER [--servers 4] [--policies round_robin ...]
        [--groups 16] [--per-group 8] [--prefix 768] [--tokens 16] [--clients 4] [--pool 64MiB]

Requests of a group have prompts with the same prefix of random tokens. They are streamed and go to
/v1/completions as token ids, by which `cache_aware` recognises a prefix. Their X-Session-ID is the
group, by which `sticky_least_loaded` and `consistent_hash` recognise it. The clients send all
requests in random order through `vllm-router` (pip install vllm-router; it must be on PATH), once
for each policy. Caches are empty before each policy.

Measured: the share of prompt tokens that servers had in their caches, the time to the first block
of an answer, the requests per second, and the number of requests of each server.

Written: fleet.json.
"""

from __future__ import annotations

import contextlib
import queue
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import BenchmarkError, Table, positive
from benchmarks.server_process import ROOT, START_S, ServerProcess, free_port, is_healthy, session

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

POLICIES = ("round_robin", "power_of_two", "cache_aware", "sticky_least_loaded")
COLUMNS = {
    "policy": "<20",
    "cached": ">7.1%",
    "median first block, ms": ">22.0f",
    "90 %, ms": ">9.0f",
    "requests/s": ">10.1f",
    "requests of each server": "<24",
}
# Ids of prompts, and number of tokens that each request has after its prefix
FIRST_ID, LAST_ID, OWN = 100, 999, 16
ROUTER = ("--health-check-endpoint", "/ready", "--health-check-interval-secs", "1")


@dataclass(frozen=True)
class Row:
    """Result for one policy."""

    policy: str
    cached: float
    median_ms: float
    high_ms: float
    rate: float
    shares: str


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    router = shutil.which("vllm-router")
    if router is None:
        raise BenchmarkError("vllm-router: not on PATH; pip install vllm-router")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    table = Table(COLUMNS, "policy cached median_ms high_ms rate shares")
    with servers(options) as urls:
        for policy in options.policies:
            table.add(measure(options, router, policy, urls))
    harness.write("fleet", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("fleet", __doc__)
    parser.option("--model", about="checkpoint", type=Path, required=True)
    parser.option("--servers", 4, "servers behind the router", type=positive)
    parser.option("--policies", POLICIES, "policies of the router")
    parser.option("--groups", 16, "prefixes", type=positive)
    parser.option("--per-group", 8, "requests that share one", type=positive)
    parser.option("--prefix", 768, "tokens of a prefix", type=positive)
    parser.option("--tokens", 16, "tokens of an answer", type=positive)
    parser.option("--clients", 4, "requests at a time", type=positive)
    parser.option("--pool", "64MiB", "VLLM_ACTIVATION_POOL_SIZE_BYTES of each server")
    parser.option("--max-model-len", 2048, "longest length of the servers", type=positive)
    parser.option("--seed", 0, "seed of prefixes and their order")
    parser.option(
        "--balance", 64, "how many more requests a cache-aware worker may have than another"
    )
    return parser.parse_args(arguments)


@contextmanager
def servers(options: argparse.Namespace) -> Iterator[list[str]]:
    """Start the servers in parallel; yield their addresses."""
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "VLLM_ACTIVATION_POOL_SIZE_BYTES": options.pool,
        "VLLM_SERVER_DEV_MODE": "1",  # enables the route that empties the cache
    }
    with ExitStack() as stack:
        processes = []
        for index in range(options.servers):
            port = free_port()
            command = [sys.executable, "-m", "vllm.entrypoints.api_server", "--port", str(port)]
            command += ["--model", str(options.model), "--served-model-name", "model"]
            command += ["--max-model-len", str(options.max_model_len)]
            log = options.output_dir / f"server_{index}.log"
            server = ServerProcess(command, log, port=port, variables=variables)
            processes.append(stack.enter_context(server))
        for server in processes:
            server.wait_until_healthy(START_S)
        yield [server.url for server in processes]


@contextmanager
def routed(options: argparse.Namespace, router: str, policy: str, urls: list[str]) -> Iterator[str]:
    """Run the router with a policy; yield its address."""
    port = free_port()
    command = [router, "--port", str(port), "--policy", policy, *ROUTER]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *urls]
    command += ["--balance-abs-threshold", str(options.balance), "--balance-rel-threshold", "1.1"]
    with (options.output_dir / f"router_{policy}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while not is_healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BenchmarkError(f"the router with {policy} did not start; see {log.name}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def requests_of(options: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """Make group and prompt of all requests, in random order."""
    draws = random.Random(options.seed)

    def some(number: int) -> list[int]:
        return [draws.randint(FIRST_ID, LAST_ID) for _ in range(number)]

    prefixes = {str(group): some(options.prefix) for group in range(options.groups)}
    requests = [(g, p + some(OWN)) for g, p in prefixes.items() for _ in range(options.per_group)]
    draws.shuffle(requests)
    return requests


def measure(options: argparse.Namespace, router: str, policy: str, urls: list[str]) -> Row:
    """Send all requests through the router with one policy."""
    with session() as http:
        for url in urls:
            http.post(f"{url}/reset_prefix_cache", timeout=60).raise_for_status()
    before = [counters(url) for url in urls]
    waiting: queue.SimpleQueue[tuple[str, list[int]]] = queue.SimpleQueue()
    for request in requests_of(options):
        waiting.put(request)
    times: list[float] = []
    errors: list[Exception] = []
    with routed(options, router, policy, urls) as url:
        start = time.perf_counter()
        clients = [
            threading.Thread(target=client, args=(url, options.tokens, waiting, times, errors))
            for _ in range(options.clients)
        ]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        seconds = time.perf_counter() - start
    if errors:
        raise BenchmarkError(f"{policy}: {len(errors)} clients failed; the first: {errors[0]}")
    after = [counters(url) for url in urls]
    queries, hits, served = (
        [end[name] - begin[name] for begin, end in zip(before, after, strict=True)]
        for name in ("queries", "hits", "served")
    )
    return Row(
        policy,
        sum(hits) / sum(queries) if sum(queries) else 0.0,
        1000 * statistics.median(times),
        1000 * statistics.quantiles(times, n=10)[-1],
        len(times) / seconds,
        " ".join(f"{share:.0f}" for share in served),
    )


def client(
    url: str,
    tokens: int,
    waiting: queue.SimpleQueue[tuple[str, list[int]]],
    times: list[float],
    errors: list[Exception],
) -> None:
    """Send requests until none is left; record the seconds to the first block of each."""
    body = {"model": "model", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body["stream"] = True
    try:
        with session() as http, contextlib.suppress(queue.Empty):
            while True:
                group, prompt = waiting.get_nowait()
                start = time.perf_counter()
                with http.post(
                    f"{url}/v1/completions",
                    json={**body, "prompt": prompt},
                    headers={"X-Session-ID": group},
                    stream=True,
                    timeout=300,
                ) as response:
                    response.raise_for_status()
                    events = (line for line in response.iter_lines() if line)
                    if b"error" in next(events):
                        raise BenchmarkError("a stream ended with an error")
                    times.append(time.perf_counter() - start)
                    for _ in events:
                        pass
    except Exception as error:
        errors.append(error)


def counters(url: str) -> dict[str, float]:
    """Read a server's counters: prompt tokens looked up and found in its cache, and answers."""
    names = {
        "vllm:prefix_cache_queries_total": "queries",
        "vllm:prefix_cache_hits_total": "hits",
        "vllm:request_success_total": "served",
    }
    values = dict.fromkeys(names.values(), 0.0)
    time.sleep(0.2)  # values of short steps may be 0.1 s old
    with session() as http:
        text = http.get(f"{url}/metrics", timeout=60).text
    for line in text.splitlines():
        name = names.get(line.partition("{")[0])
        if name is not None:
            values[name] += float(line.rpartition(" ")[2])
    return values


if __name__ == "__main__":
    sys.exit(main())

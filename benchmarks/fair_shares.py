#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Short requests during a long one: how long each waits for the other.

    benchmarks/fair_shares.py [--parts alone beside clients] [--length 65536 --steps 4]
    benchmarks/fair_shares.py --length 204800 --steps 2 --parts alone beside abort [--watch 20]
    benchmarks/fair_shares.py --sequence-parallel-size 2 --parts beside --watch 15
    benchmarks/fair_shares.py --model models/llada-tiny --length 8192 --steps 16   (on a CPU)

One engine runs in this process, and its ranks run in other processes. Without --model it has the
shape of LLaDA-8B and random weights. The loop that steps the engine adds requests between steps, as
a server's engine does. So the wait of a request starts when its client sends it. Parts:

    alone      the long request by itself, with undivided steps and with slices
    beside     one client of short requests, with random pauses, while the long request runs
    clients    eight clients without pauses: how much longer the long request takes than alone,
               compared with the configured shares
    abort      the long request is aborted in its first step: time until its memory is released

With --watch SECONDS `beside` ends this long after the short requests began. The long request is
aborted then, which `abort` measures. Written: fair_shares.json. Exit status: 0 only if all measured
values are within their bounds.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

import torch

from benchmarks import harness
from benchmarks.harness import BenchmarkError, Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

PARTS = ("alone", "beside", "clients", "abort")
NUM_CLIENTS = 8
BLOCK = 32
NUM_WARM_UP, NUM_ALONE = 3, 9  # short requests by themselves: warm-up, measured
# Bounds in seconds on an H200 for the shape of LLaDA-8B, by length: median, longest.
SECONDS = {65_536: (0.35, 0.8), 204_800: (0.5, 1.2)}
# Longest short request relative to its time alone, on other machines and lengths
MAX_TIMES_ALONE = 8.0
MORE_OVER_RANKS = 1.3  # factor of all bounds in seconds if several GPUs share the long request
MAX_SLOWDOWN = 2.3  # slowdown of the long request while one client sends requests
MAX_OVER_SHARE = 1.15
MAX_OVER_UNCUT = 1.01
MAX_ABORT_S = 0.5
COLUMNS = {"measure": "<64", "value": ">9.3f", "unit": "<4", "at most": ">8.3g", "": "<6"}


@dataclass(frozen=True)
class Row:
    """Line of the table; if `bound` is None, any value is good."""

    measure: str
    value: float
    unit: str
    bound: float | None = None

    @property
    def is_good(self) -> bool:
        return self.bound is None or self.value <= self.bound

    @property
    def verdict(self) -> str:
        return "" if self.bound is None else ("ok" if self.is_good else "MISSED")


@dataclass
class Client:
    """Client that sends one short request repeatedly.

    Attributes:
        most_pause_s: longest pause between an answer and the next request, drawn uniformly; 0 for
            none.
        sent: time at which the unanswered request was sent.
        next_at: time at which the next request is sent.
        latencies: seconds of each answer.
    """

    name: str
    most_pause_s: float
    draw: random.Random
    sent: float | None = None
    next_at: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def answered(self, now: float) -> None:
        assert self.sent is not None
        self.latencies.append(now - self.sent)
        self.sent, self.next_at = None, now + self.draw.uniform(0.0, self.most_pause_s)


def held_bytes(worker: Any, req_id: str | None = None) -> int:
    """Return the pool bytes of a worker's paused step; at least 1 while `req_id` exists."""
    runner = worker.worker.model_runner
    return max(int(runner.pool.frame_bytes), int(req_id in runner.canvases))


def synchronise(worker: Any) -> None:
    worker.worker.synchronize_device()


class Bench:
    """Requests of one engine, and their measurement.

    Args:
        llm: `vllm.LLM` whose engine core lives in this process.
        options: options of the command line.
    """

    def __init__(self, llm: Any, options: argparse.Namespace) -> None:
        self._engine, self._llm, self._options = llm.llm_engine, llm, options
        self._vocab_size = llm.model_config.get_vocab_size()
        self._long_steps = llm.llm_engine.engine_core.engine_core.scheduler.long_steps
        self._pause_s = self._long_steps.longest_pause_s
        self._share: float = options.long_share
        self._num_sent = 0
        self._uncut_s = self._sliced_s = 0.0  # seconds of a step of the long request alone

    # ---- requests ----

    def _send(self, num_tokens: int, gen_length: int, steps: int) -> tuple[str, str]:
        """Send a request; return its name and the engine's id."""
        self._num_sent += 1
        name = str(self._num_sent)
        prompt = in_process.random_prompt(num_tokens, self._vocab_size, self._num_sent)
        parameters = {"gen_length": gen_length, "block_length": BLOCK, "steps": steps}
        sampling = harness.sampling_of(parameters)
        own = self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name, str(own)

    def _send_long(self) -> tuple[str, str]:
        """Send a long request of `--steps` steps over one block, each computing all rows."""
        steps = self._options.steps
        return self._send(self._options.length - BLOCK, BLOCK, steps)

    def _send_short(self) -> str:
        canvas = self._options.short_gen_length
        return self._send(self._options.short_prompt, canvas, self._options.short_steps)[0]

    def drive(self, clients: Sequence[Client], is_over: Callable[[set[str]], bool]) -> None:
        """Step the engine and send the clients' requests until `is_over`.

        Args:
            clients: senders of short requests.
            is_over: called after every step with the names of the requests that have ended in it.
        """
        waiting: dict[str, Client] = {}
        now = time.perf_counter()
        for client in clients:
            client.next_at = now + client.draw.uniform(0.0, client.most_pause_s)
        while True:
            now = time.perf_counter()
            for client in clients:
                if client.sent is None and client.next_at <= now:
                    client.sent = client.next_at
                    waiting[self._send_short()] = client
            ended = {output.request_id for output in self._engine.step() if output.finished}
            now = time.perf_counter()
            for name in ended & waiting.keys():
                waiting.pop(name).answered(now)
            if is_over(ended):
                return

    def _finish(self) -> None:
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._engine.step()  # the workers receive the ids of finished requests
        self._synchronise()

    def _synchronise(self) -> None:
        self._llm.collective_rpc(synchronise)

    def _held(self, req_id: str | None = None) -> int:
        return max(self._llm.collective_rpc(held_bytes, args=(req_id,)))

    # ---- parts ----

    def short_alone(self) -> float:
        """Measure the median seconds of a short request by itself."""
        client = Client("alone", 0.0, random.Random(0))
        most = NUM_WARM_UP + NUM_ALONE
        self.drive([client], lambda _: len(client.latencies) == most)
        self._finish()
        return statistics.median(client.latencies[NUM_WARM_UP:])

    def long_alone(self, pause_s: float) -> float:
        """Measure the seconds of a step of the long request by itself."""
        self._long_steps.longest_pause_s = pause_s
        self._finish()
        started = time.perf_counter()
        name, _ = self._send_long()
        self.drive([], lambda ended: name in ended)
        self._synchronise()
        seconds = time.perf_counter() - started
        self._long_steps.longest_pause_s = self._pause_s
        self._finish()
        return seconds / int(self._options.steps)

    def alone(self) -> list[Row]:
        """Measure the long request alone, undivided and in slices.

        Before that the engine measures how fast the device is.
        """
        self._learn()
        self._uncut_s = self.long_alone(0.0)
        self._sliced_s = self.long_alone(self._pause_s)
        over = self._sliced_s / self._uncut_s
        return [
            Row("long request alone, a step, not cut", self._uncut_s, "s"),
            Row("long request alone, a step, in slices", self._sliced_s, "s"),
            Row("  over not cut", over, "x", MAX_OVER_UNCUT if self._is_on_gpu else None),
        ]

    def _learn(self) -> None:
        """Run a part of the long request, so that kernels are compiled and the speed is known."""
        _, own = self._send_long()
        started = time.perf_counter()
        self.drive([], lambda _: time.perf_counter() > started + self._options.learn)
        self._abort(own)

    def _abort(self, own: str) -> float:
        """Abort a request; return the seconds until the buffers of its step are released."""
        started = time.perf_counter()
        self._engine.abort_request([own], internal=True)
        while self._held(own):
            self._engine.step()
        self._synchronise()
        return time.perf_counter() - started

    def beside(self, short_s: float) -> list[Row]:
        """Measure one client with pauses; `short_s` is the time of its request alone."""
        client = Client("beside", 4 * short_s, random.Random(1))
        started, watch = time.perf_counter(), self._options.watch or math.inf
        name, own = self._send_long()
        has_ended = False

        def is_over(ended: set[str]) -> bool:
            nonlocal has_ended
            has_ended = name in ended
            return has_ended or time.perf_counter() > started + watch

        self._engine.step()
        self.drive([client], is_over)
        taken = time.perf_counter() - started
        rows = self._latencies(client, short_s)
        rows += self._slowdown(taken, "one client") if has_ended else self._abort_rows(own)
        self._finish()
        return rows

    def _latencies(self, client: Client, short_s: float) -> list[Row]:
        if not client.latencies:
            raise BenchmarkError("--length, --steps: the long request ends before a short one")
        median, longest = statistics.median(client.latencies), max(client.latencies)
        more = MORE_OVER_RANKS if self._options.sequence_parallel_size > 1 else 1.0
        bounds = SECONDS.get(self._options.length) if self._is_on_gpu else None
        most_median, most = bounds or (None, MAX_TIMES_ALONE * short_s)
        kind = f"short request beside the long one, of {len(client.latencies)}"
        return [
            Row(f"{kind}: median", median, "s", most_median and more * most_median),
            Row(f"{kind}: longest", longest, "s", more * most),
            Row("  longest over alone", longest / short_s, "x"),
        ]

    def _slowdown(self, taken: float, beside: str) -> list[Row]:
        """Compare the long request, which took `taken` seconds, with its time alone."""
        if not self._sliced_s:
            return []
        slower = taken / (self._sliced_s * self._options.steps)
        return [Row(f"long request beside {beside}, over alone", slower, "x", MAX_SLOWDOWN)]

    def clients(self) -> list[Row]:
        """Measure eight clients that always have a request in flight."""
        clients = [Client(str(i), 0.0, random.Random(i)) for i in range(NUM_CLIENTS)]
        started = time.perf_counter()
        name, _ = self._send_long()
        self.drive(clients, lambda ended: name in ended)
        taken = time.perf_counter() - started
        self._finish()
        latencies = [latency for client in clients for latency in client.latencies]
        slower = taken / (self._sliced_s * self._options.steps)
        kind = f"{NUM_CLIENTS} clients"
        return [
            Row(f"{kind}: median of {len(latencies)}", statistics.median(latencies), "s"),
            Row(f"{kind}: longest", max(latencies), "s"),
            Row(f"{kind}: long one over alone", slower, "x"),
            Row("  over what the shares say", slower * self._share, "x", MAX_OVER_SHARE),
        ]

    def abort(self) -> list[Row]:
        """Measure the abort of the long request in its first step."""
        _, own = self._send_long()
        started = time.perf_counter()
        self.drive([], lambda _: time.perf_counter() > started + 1.0)
        return self._abort_rows(own)

    def _abort_rows(self, own: str) -> list[Row]:
        held = self._held()
        taken = self._abort(own)
        left = self._held()
        self._finish()
        return [
            Row("abort until the memory is back", taken, "s", MAX_ABORT_S),
            Row("  MiB that its step held, less what is left", (held - left) / 2**20, ""),
        ]

    @property
    def _is_on_gpu(self) -> bool:
        return torch.cuda.is_available()


@harness.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = parse_arguments(arguments)
    rows = measure(options)
    harness.write("fair_shares", options, rows)
    return 0 if all(row.is_good for row in rows) else 1


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure all requested parts."""
    names = ["long_share", "longest_pause_ms", "sequence_parallel_size"]
    if options.sequence_parallel_min_tokens is not None:
        names.append("sequence_parallel_min_tokens")
    table = Table(COLUMNS, "measure value unit bound verdict")
    with in_process.engine_of(
        options,
        max_model_len=options.length + options.short_prompt + options.short_gen_length,
        additional_config={"dllm": {name: getattr(options, name) for name in names}},
    ) as (llm, _):
        bench = Bench(llm, options)
        short_s = bench.short_alone()
        table.add(Row("short request alone, median", short_s, "s"))
        parts: dict[str, Callable[[], list[Row]]] = {
            "alone": bench.alone,
            "beside": lambda: bench.beside(short_s),
            "clients": bench.clients,
            "abort": bench.abort,
        }
        for name, run in parts.items():
            if name in options.parts and not (name == "abort" and options.watch):
                for row in run():
                    table.add(row)
    return table.rows


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("fair_shares", __doc__)
    parser.shape("llada", takes_model=True)
    parser.set_defaults(dtype="bfloat16" if torch.cuda.is_available() else "float32")
    parser.option("--parts", PARTS, choices=PARTS)
    parser.option("--length", 65_536, "tokens of the long request")
    parser.option("--steps", 4, "steps of the long request")
    parser.option("--short-prompt", 64, "tokens of the short request's prompt")
    parser.option("--short-gen-length", 64, "tokens of its canvas")
    parser.option("--short-steps", 32, "steps of the short request")
    parser.option("--watch", 0.0, "seconds of `beside`, at most; 0: to the long one's end")
    parser.option("--learn", 2.0, "seconds before `alone`")
    parser.option("--sequence-parallel-size", 1, "ranks that share long steps")
    help_text = "rows from which a step is shared (default: where that pays)"
    parser.option("--sequence-parallel-min-tokens", None, help_text, type=int)
    parser.option("--long-share", 0.5, "share of the time that long requests keep")
    parser.option("--longest-pause-ms", 100.0, "longest wait of a short request")
    options = parser.parse_args(arguments)
    if "clients" in options.parts and "alone" not in options.parts:
        parser.error("--parts: clients requires alone as well")
    return options


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several GPUs compared with one, in one run: time of a step, and tokens per second.

    benchmarks/parallel.py [--ways one tp2 dp2 sp2] [--output-dir results/parallel]
    benchmarks/parallel.py --ways one tp2 --long --clients --family llada-moe --quantization fp8
    benchmarks/parallel.py --ways one --lengths --clients --attention-dtype model fp8 \
        --quantization fp8
    benchmarks/parallel.py --model models/llada-tiny --ways one tp2 sp2 --long 1024   (on a CPU)

Without --model the engines have random weights of the shape of LLaDA-8B, or of --family and --size.
Ways: `one` GPU, `tpN` tensor-parallel and `spN` sequence-parallel ranks, `dpN` replicas behind
upstream's load balancer. All engines start together, each in a separate process, and are measured
one after the other while the others are idle. This takes three minutes on two H200s. Measured:

    step       milliseconds from step to step of a lone request with this number of rows, without a
               cache (`one`, `tpN`); for block-causal families of a block of 32 after this number
    clients    tokens per second of the given number of clients per replica with the given cache
               (CACHE:NUMBER), each with one request: prompt 128, canvas 128 in blocks of 32, two
               tokens per forward
    long       seconds of the only step of a lone request with this number of rows; its prompt is
               everything except a block of 128 (`one`, `spN`), for each --attention-dtype; and GiB
               of activations per rank. --longest-pause-ms decides how the step is divided; 0: not
               at all

Written: parallel.json and parallel.png.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import BenchmarkError, Table

harness.prepare(
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # the workers draw the weights
    VLLM_ACTIVATION_POOL_SIZE_BYTES=str(16 << 30),  # engines share the cards
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Sequence
    from multiprocessing.connection import Connection

WAYS = ("one", "tp2", "dp2", "sp2")
LENGTHS = (32, 256, 1024)
BLOCK = 32
PROMPT, CANVAS = 128, 128
LONG_CANVAS, WARM_ROWS = 128, 8192
LONG = (65_536, 204_800)
FEW_STEPS, ROUNDS = 4, 3
BALANCED_S = 0.5  # a balancer receives the load of replicas a tenth of a second late
CLIENTS = ["none:32", "dual:64"]
CACHES = ("none", "dual")
COLUMNS = {"way": "<4", "measure": "<42", "value": ">9.2f", "unit": "<9", "over one": ">8.2f"}


class Clients(NamedTuple):
    """Number of clients per replica, and the cache of their requests."""

    cache: str
    number: int


@dataclass(frozen=True)
class Row:
    """Measure of one way; `ratio` is relative to one GPU in this run."""

    way: str
    measure: str
    value: float
    unit: str
    ratio: float | None = None


def settings_of(job: Job) -> dict[str, Any]:
    """Return the engine arguments of a job."""
    way = job.way
    dllm: dict[str, Any] = {"attention_dtype": "fp8"} if "fp8" in job.attention else {}
    if job.longest_pause_ms is not None:
        dllm["longest_pause_ms"] = job.longest_pause_ms
    if way.startswith("sp"):
        dllm["sequence_parallel_size"] = int(way[2:])
    sizes = {"tp": "tensor_parallel_size", "dp": "data_parallel_size"}
    size = {sizes[way[:2]]: int(way[2:])} if way[:2] in sizes else {}
    return size | {"additional_config": {"dllm": dllm}}


class Client:
    """Client that sends requests to an engine one after the other."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._number = engine, 0
        # Values of the latest answered request.
        self.denoise_s: float = 0.0
        self.peak_bytes: int = 0
        self._ids = engine.model_config.get_vocab_size() // 2  # number of ordinary ids

    async def ask(self, prompt_length: int, extra: dict[str, Any]) -> int:
        """Send a request; return the number of tokens of its answer, which is the whole canvas."""
        self._number += 1
        number = self._number
        prompt = [(7 * number + 13 * i) % self._ids for i in range(prompt_length)]
        sampling = harness.sampling_of(extra)
        async for output in self._engine.generate(
            {"prompt_token_ids": prompt}, sampling, str(number)
        ):
            last = output
        report = harness.report_of(last)
        self.denoise_s, self.peak_bytes = report["denoise_ms"] / 1000, report["peak_bytes"]
        return len(last.outputs[0].token_ids)

    async def step_ms(self, length: int) -> float:
        """Measure the milliseconds per additional step of a lone request of `length` rows."""
        config = self._engine.model_config.hf_config
        canvas = BLOCK if config.family.is_block_causal else min(BLOCK, length // 2)

        async def seconds(steps: int) -> float:
            blocks = {"algorithm": "semi_ar", "gen_length": canvas, "block_length": canvas}
            started = time.perf_counter()
            await self.ask(max(length - canvas, 1), {**blocks, "steps": steps})
            return time.perf_counter() - started

        await seconds(canvas)
        times = [(await seconds(canvas), await seconds(FEW_STEPS)) for _ in range(ROUNDS)]
        many, few = (statistics.median(column) for column in zip(*times, strict=True))
        return 1000 * (many - few) / (canvas - FEW_STEPS)

    async def long_step_s(self, length: int, attention: str) -> float:
        """Measure one step of `length` rows with the given dtype of attention."""
        canvas = min(LONG_CANVAS, length // 2)
        blocks = {"algorithm": "semi_ar", "gen_length": canvas, "block_length": canvas}
        await self.ask(length - canvas, {**blocks, "steps": 1, "attention_dtype": attention})
        return self.denoise_s

    async def tokens_per_s(self, num_clients: int, cache: str) -> float:
        """Measure tokens per second of `num_clients` requests at once, after a warm-up."""
        extra: dict[str, Any] = {"algorithm": "semi_ar", "gen_length": CANVAS, "cache": cache}
        extra["block_length"] = BLOCK

        async def ask_all(steps: int) -> int:
            parameters = {**extra, "steps": steps}
            return sum(
                await asyncio.gather(*(self.ask(PROMPT, parameters) for _ in range(num_clients)))
            )

        await ask_all(CANVAS // BLOCK)
        await asyncio.sleep(BALANCED_S)
        started = time.perf_counter()
        return await ask_all(CANVAS // 2) / (time.perf_counter() - started)


@dataclass(frozen=True)
class Job:
    """Engine, and the measurements to take.

    Attributes:
        way: one of `WAYS`.
        model: checkpoint.
        settings: settings of the engine; with load_format "dummy" weights are drawn.
        lengths: rows of the steps to measure.
        clients: clients whose tokens per second are measured.
        long: lengths of long steps; if not empty, nothing else is measured.
        attention: dtypes of their attention, with one step each.
        longest_pause_ms: setting of the engine; None for its default.
    """

    way: str
    model: Path
    settings: dict[str, Any]
    lengths: tuple[int, ...] = ()
    clients: tuple[Clients, ...] = ()
    long: tuple[int, ...] = ()
    attention: tuple[str, ...] = ()
    longest_pause_ms: float | None = None

    @property
    def name(self) -> str:
        return f"{self.way}, long" if self.long else self.way

    async def run(self, parent: Connection) -> None:
        """Start the engine, wait for the start signal, and send all rows, then None."""
        from vllm.v1.engine.async_llm import AsyncLLM

        from vllm import AsyncEngineArgs

        settings = self.settings | settings_of(self)
        settings["enforce_eager"] = bool(self.long)
        engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(model=str(self.model), disable_log_stats=True, **settings)
        )
        try:
            if "load_format" in settings:
                from benchmarks.random_weights import randomise_rank

                await engine.collective_rpc(randomise_rank)
            parent.send("ready")
            parent.recv()
            async for measure, value, unit in self._measures(engine):
                parent.send(Row(self.way, measure, value, unit))
            parent.send(None)
        finally:
            engine.shutdown()
            # Otherwise it shuts down again when it is collected, and that fails while Python ends.
            del engine
            gc.collect()

    async def _measures(self, engine: Any) -> AsyncIterator[tuple[str, float, str]]:
        """Yield (measure, value, unit)."""
        client = Client(engine)
        if self.long:
            for attention in self.attention:
                await client.long_step_s(min(WARM_ROWS, *self.long), attention)
            for length, attention in product(self.long, self.attention):
                remark = "" if attention == "model" else f", {attention} attention"
                seconds = await client.long_step_s(length, attention)
                yield f"one step of {length:,}{remark}", seconds, "s"
                yield f"activations of {length:,}{remark}", client.peak_bytes / (1 << 30), "GiB"
            return
        is_replicated = self.way.startswith("dp")
        for length in () if is_replicated else self.lengths:
            yield f"step, T = {length:,}", await client.step_ms(length), "ms"
        replicas = int(self.way[2:]) if is_replicated else 1
        for cache, number in self.clients:
            value = await client.tokens_per_s(number * replicas, cache)
            yield f"{number} clients a replica, cache {cache}", value, "tokens/s"


def run_job(job: Job, parent: Connection) -> None:
    """Run an engine in its process; it ends together with the process that started it."""
    try:
        asyncio.run(job.run(parent))
    except EOFError:
        print(f"{job.name}: the benchmark ended first", flush=True)


class Running:
    """Job in its process."""

    def __init__(self, job: Job) -> None:
        self.name = job.name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_job, args=(job, theirs))
        self._process.start()
        theirs.close()

    def measure(self, table: Table) -> None:
        """Add the job's rows, up to the point where its process died.

        Rows that were also measured on one GPU are added with their ratio to it.
        """
        try:
            self._connection.send("begin")
            while (row := self._connection.recv()) is not None:
                one = {known.measure: known.value for known in table.rows if known.way == "one"}
                ratio = row.value / one[row.measure] if row.measure in one else None
                table.add(replace(row, ratio=ratio))
        except (EOFError, BrokenPipeError):
            table.note(f"{self.name}: died")

    def wait_until_ready(self) -> None:
        try:
            self._connection.recv()
        except EOFError:
            print(f"{self.name}: did not start", flush=True)

    def end(self) -> None:
        """End the process, so that its memory is freed."""
        self._connection.close()
        self._process.join(30)
        self._process.terminate()


def jobs_of(options: argparse.Namespace, model: Path) -> list[Job]:
    """Make the engines of the ways; engines for long steps are separate and have no graphs."""
    settings: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 128}
    if options.quantization:
        settings["quantization"] = options.quantization
    if options.model is None:
        settings |= {"dtype": options.dtype, "load_format": "dummy", "max_model_len": 4096}
    jobs = [
        Job(way, model, settings, tuple(options.lengths), tuple(options.clients))
        for way in options.ways
        if not way.startswith("sp") and (options.lengths or options.clients)
    ]
    if options.model is None and options.long:
        settings = settings | {"max_model_len": max(options.long)}
    if options.long:
        divided = [way for way in options.ways if way == "one" or way.startswith("sp")]
        long = {
            "long": tuple(options.long),
            "attention": tuple(options.attention_dtype),
            "longest_pause_ms": options.longest_pause_ms,
        }
        jobs += [Job(way, model, settings, **long) for way in divided]
    return jobs


def run_all(jobs: list[Job]) -> list[Row]:
    """Run all jobs; return their rows."""
    started = time.perf_counter()
    running = [Running(job) for job in jobs]
    for one in running:
        one.wait_until_ready()
    print(f"ready after {time.perf_counter() - started:.0f} s", flush=True)
    table = Table(COLUMNS, "way measure value unit ratio")
    for one in running:
        one.measure(table)
        one.end()
    return table.rows


def paint(rows: Sequence[Row], names: Sequence[str], axis: Any) -> None:
    """Draw ratios to one GPU, with one group of bars per measure."""
    ways = [way for way in dict.fromkeys(row.way for row in rows) if way != "one"]
    for number, way in enumerate(ways):
        speeds = {
            row.measure: 1 / row.ratio if row.unit in ("ms", "s") else row.ratio
            for row in rows
            if row.way == way and row.ratio and row.unit != "GiB"
        }
        places = [names.index(name) + 0.8 * number / len(ways) for name in speeds]
        axis.bar(places, list(speeds.values()), width=0.8 / len(ways), label=way)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    axis.set_ylabel("times one GPU's speed")
    if ways:
        axis.legend()


def clients_of(text: str) -> Clients:
    """Parse CACHE:NUMBER."""
    cache, _, number = text.partition(":")
    if cache not in CACHES or not number.isdecimal() or int(number) < 1:
        wanted = f"{' or '.join(CACHES)}, a colon, a number from 1"
        raise BenchmarkError(f"--clients: given {text!r}; wanted {wanted}")
    return Clients(cache, int(number))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("parallel", __doc__)
    parser.shape("llada", takes_model=True)
    parser.option("--quantization", None, "fp8, int4 or nf4")
    parser.option("--ways", WAYS, "one, tpN, spN, dpN")
    parser.option("--lengths", LENGTHS, "rows of a step; empty: none", nargs="*")
    parser.option("--long", LONG, "rows of a long step; empty: none", nargs="*")
    about = "CACHE:NUMBER per replica; empty: none"
    parser.option("--clients", CLIENTS, about, nargs="*")
    parser.option(
        "--attention-dtype", ["model"], "attention of long steps", choices=("model", "fp8")
    )
    parser.option("--longest-pause-ms", None, "for long steps (default: the engine's)", type=float)
    options = parser.parse_args(arguments)
    options.clients = [clients_of(text) for text in options.clients]
    # `one` first, because the others are compared with it
    options.ways = sorted(options.ways, key=lambda way: way != "one")
    return options


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    with harness.checkpoint_of(options) as model:
        rows = run_all(jobs_of(options, model))
    harness.write("parallel", options, rows)
    names = list(dict.fromkeys(row.measure for row in rows if row.unit != "GiB"))
    size = (1.6 * len(names) + 2, 4)
    harness.draw(options.output_dir / "parallel.png", partial(paint, rows, names), size=size)


if __name__ == "__main__":
    sys.exit(main())

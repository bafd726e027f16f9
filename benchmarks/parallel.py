#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Several GPUs against one, in one run: time of a step, and tokens a second.

    benchmarks/parallel.py [--ways one tp2 dp2] [--lengths 32 256 1024] [--output-dir results]
    benchmarks/parallel.py --ways one sp2 --long 65536 204800
    benchmarks/parallel.py --model models/llada-tiny --ways one tp2 --lengths 32   (on a CPU)

Without --model the engines have the shape of LLaDA-8B and random weights, bf16. Ways: `one` GPU,
`tpN` tensor-parallel and `spN` sequence-parallel ranks, `dpN` replicas behind upstream's load
balancer. Measured of each:

    step       milliseconds from step to step of a lone request of so many rows, no cache (not of
               replicas, of which one alone has it)
    no cache   tokens a second of 32 clients, which ask again as soon as they are answered: prompt
               128, canvas 128 in blocks of 32, two tokens a forward
    long       with --long, in place of all these: seconds of the only step of a lone request of so
               many rows, its prompt all but a block of 128
    dual       the same with `cache: dual` and 64 clients a replica (64 of all where ranks share)

Written: parallel.json and parallel.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

for _name, _value in {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # weights are drawn in the workers
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}.items():
    os.environ.setdefault(_name, _value)

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from make_dummy_checkpoint import write_checkpoint  # noqa: E402

from benchmarks.run_record import software_record  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WAYS = ("one", "tp2", "dp2")
LENGTHS = (32, 256, 1024)
BLOCK = 32
PROMPT, CANVAS = 128, 128
LONG_CANVAS, WARM_ROWS = 128, 4096
FEW_STEPS, ROUNDS = 4, 5
CLIENTS = {"no cache": 32, "dual": 64}


@dataclass(frozen=True)
class Row:
    """One number of one way; `ratio` is to one GPU of the same run."""

    way: str
    measure: str
    value: float
    unit: str
    ratio: float | None = None


def randomise_rank(worker: Any) -> None:
    """Draw the weights of a rank, whose loader has drawn very small ones."""
    import torch

    from benchmarks.plain_model import randomise

    torch.manual_seed(0)  # ranks that divide rows have the same ones
    randomise(worker.worker.model_runner.model)


def settings_of(way: str) -> dict[str, Any]:
    """Arguments of an engine."""
    if way == "one":
        return {}
    if way.startswith("sp"):
        return {"additional_config": {"dllm": {"sequence_parallel_size": int(way[2:])}}}
    name = {"tp": "tensor_parallel_size", "dp": "data_parallel_size"}[way[:2]]
    return {name: int(way[2:])}


class Client:
    """Asks an engine, again and again."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._number = engine, 0
        self.denoise_s = 0.0  # of the request that was answered last
        self._ids = engine.model_config.get_vocab_size() // 2  # ordinary ones

    async def ask(self, prompt_length: int, extra: dict[str, Any]) -> int:
        """Tokens of an answer; the whole canvas, stop tokens or not."""
        from vllm import SamplingParams

        self._number += 1
        number = self._number
        prompt = [(7 * number + 13 * i) % self._ids for i in range(prompt_length)]
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=extra["gen_length"],
            ignore_eos=True,
            detokenize=False,
            extra_args=extra,
        )
        asked = self._engine.generate({"prompt_token_ids": prompt}, sampling, str(number))
        async for output in asked:
            last = output
        report = (last.kv_transfer_params or {}).get("dllm", {})
        if "error" in report:
            raise RuntimeError(f"request {number} failed: {report['error']}")
        self.denoise_s = report["denoise_ms"] / 1000
        return len(last.outputs[0].token_ids)

    async def step_ms(self, length: int) -> float:
        """From step to step of a lone request of so many rows: what more steps take longer."""
        canvas = min(BLOCK, length // 2)

        async def seconds(steps: int) -> float:
            blocks = {"algorithm": "semi_ar", "gen_length": canvas, "block_length": canvas}
            started = time.perf_counter()
            await self.ask(length - canvas, {**blocks, "steps": steps})
            return time.perf_counter() - started

        await seconds(canvas)
        times = [(await seconds(canvas), await seconds(FEW_STEPS)) for _ in range(ROUNDS)]
        many, few = (statistics.median(column) for column in zip(*times, strict=True))
        return 1000 * (many - few) / (canvas - FEW_STEPS)

    async def long_step_s(self, length: int) -> float:
        """One step of so many rows."""
        canvas = min(LONG_CANVAS, length // 2)
        blocks = {"algorithm": "semi_ar", "gen_length": canvas, "block_length": canvas}
        await self.ask(length - canvas, {**blocks, "steps": 1})
        return self.denoise_s

    async def tokens_per_s(self, num_clients: int, cache: str, rounds: int) -> float:
        """Of clients that ask so often each, after one round to warm up."""
        extra: dict[str, Any] = {"algorithm": "semi_ar", "gen_length": CANVAS, "cache": cache}
        extra |= {"block_length": BLOCK, "steps": CANVAS // 2}

        async def client(rounds: int) -> int:
            return sum([await self.ask(PROMPT, extra) for _ in range(rounds)])

        await asyncio.gather(*(client(1) for _ in range(num_clients)))
        started = time.perf_counter()
        counts = await asyncio.gather(*(client(rounds) for _ in range(num_clients)))
        return sum(counts) / (time.perf_counter() - started)


async def measures(
    engine: Any, way: str, lengths: list[int], long: list[int], rounds: int
) -> AsyncIterator[tuple[str, float, str]]:
    """(measure, value, unit) of one engine."""
    client = Client(engine)
    if long:
        await client.long_step_s(min(WARM_ROWS, *long))
        for length in long:
            yield f"one step of {length:,}", await client.long_step_s(length), "s"
        return
    is_replicated = way.startswith("dp")
    for length in () if is_replicated else lengths:
        yield f"step, T = {length:,}", await client.step_ms(length), "ms"
    replicas = int(way[2:]) if is_replicated else 1
    for name, number in CLIENTS.items():
        cache = "none" if name == "no cache" else name
        value = await client.tokens_per_s(number * replicas, cache, rounds)
        yield f"{number} clients a replica, {name}", value, "tokens/s"


async def run_way(
    way: str, model: Path, asked: argparse.Namespace, *, draws: bool, **settings: Any
) -> list[Row]:
    """All rows of one way, without ratios."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import AsyncEngineArgs

    if draws:
        settings["load_format"] = "dummy"
    arguments = AsyncEngineArgs(
        model=str(model), disable_log_stats=True, **settings_of(way), **settings
    )
    started = time.perf_counter()
    engine = AsyncLLM.from_engine_args(arguments)
    rows = []
    try:
        if draws:
            await engine.collective_rpc(randomise_rank)
        print(f"{way}: ready after {time.perf_counter() - started:.0f} s", flush=True)
        async for measure, value, unit in measures(
            engine, way, asked.lengths, asked.long, asked.rounds
        ):
            print(f"{way:<4} {measure:<34} {value:>9.2f} {unit}", flush=True)
            rows.append(Row(way, measure, value, unit))
    finally:
        engine.shutdown()
    return rows


def with_ratios(rows: list[Row]) -> list[Row]:
    """The rows, those beside one of one GPU with their ratio to it."""
    one = {row.measure: row.value for row in rows if row.way == "one"}
    return [
        Row(row.way, row.measure, row.value, row.unit, row.value / one[row.measure])
        if row.measure in one
        else row
        for row in rows
    ]


def draw(rows: list[Row], path: Path) -> None:
    """Ratios to one GPU, one group of bars a measure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.measure for row in rows))
    ways = [way for way in dict.fromkeys(row.way for row in rows) if way != "one"]
    figure, axes = pyplot.subplots(figsize=(1.6 * len(names) + 2, 4))
    for number, way in enumerate(ways):
        speeds = {
            row.measure: 1 / row.ratio if row.unit in ("ms", "s") else row.ratio
            for row in rows
            if row.way == way and row.ratio
        }
        places = [names.index(name) + 0.8 * number / max(len(ways), 1) for name in speeds]
        axes.bar(places, list(speeds.values()), width=0.8 / max(len(ways), 1), label=way)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), [name.replace(", ", ",\n") for name in names], fontsize=8)
    axes.set_ylabel("times one GPU's speed")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="one, tpN, spN, dpN")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--long", nargs="+", type=int, default=[])
    parser.add_argument("--rounds", type=int, default=2, help="requests of a client")
    parser.add_argument("--output-dir", type=Path, default=Path("results/parallel"))
    arguments = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder)
        if arguments.model is None:
            write_checkpoint(model, "llada")
        settings: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_num_seqs": 128}
        if arguments.model is None:
            settings |= {"dtype": "bfloat16", "max_model_len": max(4096, *arguments.long)}
        for way in arguments.ways:
            draws = arguments.model is None
            rows += asyncio.run(run_way(way, model, arguments, draws=draws, **settings))
    rows = with_ratios(rows)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    record = software_record() | {"rows": [asdict(row) for row in rows]}
    (arguments.output_dir / "parallel.json").write_text(json.dumps(record, indent=1))
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        print(f"{row.way:<4} {row.measure:<34} {row.value:>9.2f} {row.unit:<9} {ratio}")
    draw(rows, arguments.output_dir / "parallel.png")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Long answers to long prompts with `cache: frozen`: the first step, and all further steps.

    benchmarks/frozen.py [--family llada] [--prompts 16256 204672] [--canvas 128] [--steps 128]
        [--compare 16384] [--pool-gib G] [--host-gib H] [--output-dir results/frozen]

The model has a released shape and random weights. Prompts are token ids, and the engine runs one
request at a time. Measured are the whole request, from the call to its answer; its first step,
which computes prompt and canvas; and the median of the other steps, from the start of one to the
start of the next. Sequences of up to --compare tokens also run without a cache. With a small pool,
keys and values of some layers are in host memory and are copied in every step.

Written: frozen.json.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from benchmarks import harness
from benchmarks.harness import Table, positive
from benchmarks.shapes import BLOCK_FAMILIES, Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

GIB = 1 << 30
FAMILIES = tuple(family for family in harness.FAMILIES if family not in BLOCK_FAMILIES)
WARM_UP_PROMPT = 200
COLUMNS = {"prompt": ">8", "cache": ">7", "steps": ">6", "total s": ">9.2f", "first s": ">9.2f"}
COLUMNS |= {"step ms": ">9.2f", "peak GiB": ">9.2f", "host layers": ">11"}
POOLS = {
    "pool_gib": "VLLM_ACTIVATION_POOL_SIZE_BYTES",
    "host_gib": "VLLM_HOST_CACHE_SIZE_BYTES",
}


@dataclass(frozen=True)
class Row:
    """Result of one request.

    Attributes:
        total_s: seconds from the call to the answer.
        first_s: seconds until the second step began.
        step_ms: median interval of the steps after it.
        peak_bytes: bytes of the largest step, including kept keys and values.
        host_layers: number of layers whose keys and values were in host memory.
    """

    prompt: int
    cache: str
    num_steps: int
    total_s: float
    first_s: float
    step_ms: float
    peak_bytes: int
    host_layers: int

    @property
    def peak_gib(self) -> float:
        return self.peak_bytes / GIB


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    harness.write("frozen", options, measure(options))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("frozen", __doc__)
    parser.shape("llada", FAMILIES)
    parser.option("--prompts", [16256, 204672], "lengths of the prompts", type=positive)
    parser.option("--canvas", 128, type=positive)
    parser.option("--steps", None, "default: one for each token of the canvas", type=int)
    parser.option("--compare", 16384, "longest sequence without a cache; 0: none")
    parser.option("--pool-gib", None, "activation pool (default: all free memory)", type=float)
    parser.option("--host-gib", None, "host memory for keys and values", type=float)
    options = parser.parse_args(arguments)
    options.steps = options.steps or options.canvas
    return options


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure every prompt with a frozen cache, and without a cache if it is short enough."""
    for name, variable in POOLS.items():
        if getattr(options, name) is not None:
            os.environ[variable] = str(int(getattr(options, name) * GIB))
    vocab_size = Shape.of(harness.configuration_of(options)).vocab_size
    cases = []
    for prompt in options.prompts:
        is_compared = prompt + options.canvas <= options.compare
        cases += [(prompt, cache) for cache in (["none"] if is_compared else []) + ["frozen"]]
    attributes = "prompt cache num_steps total_s first_s step_ms peak_gib host_layers"
    table = Table(COLUMNS, attributes, len(cases))
    with in_process.engine_of(
        options,
        max_model_len=max(*options.prompts, WARM_UP_PROMPT) + options.canvas,
    ) as (llm, runner):
        for number, (length, cache) in enumerate([(WARM_UP_PROMPT, "frozen"), *cases]):
            prompt = in_process.random_prompt(length, vocab_size, number)
            row = measure_request(llm, runner, prompt, cache, options)
            if number:
                table.add(row)
    return table.rows


def measure_request(
    llm: Any, runner: Any, prompt: Sequence[int], cache: str, options: argparse.Namespace
) -> Row:
    """Measure one request by itself."""
    canvas, host_layers = options.canvas, []
    parameters = {
        "gen_length": canvas,
        "block_length": canvas,
        "steps": options.steps,
        "cache": cache,
    }
    start = runner.start

    def noting_start(new: Any) -> None:
        host_layers.append(new.host_layers)
        start(new)

    runner.start = noting_start
    try:
        with in_process.StepLog().attached(runner) as log:
            begun = time.perf_counter()
            (output,) = in_process.run_requests(llm, [prompt], parameters)
            total_s = time.perf_counter() - begun
    finally:
        del runner.start
    later = sorted(log.steps(), key=lambda step: step.started)[1:]
    return Row(
        prompt=len(prompt),
        cache=cache,
        num_steps=output.kv_transfer_params["dllm"]["num_forwards"],
        total_s=total_s,
        first_s=later[0].started - begun,
        step_ms=in_process.median_interval_ms(later),
        peak_bytes=output.kv_transfer_params["dllm"]["peak_bytes"],
        host_layers=host_layers[0],
    )


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of the engine to the first block after a long shared prefix, compared with a short prompt.

    benchmarks/prefix_cache.py [--family llada2] [--size mini] [--prefix 8192] [--prompt 32]
        [--steps-per-block 4] [--rounds 20] [--output-dir results/prefix_cache]

The model has a released shape and random weights, and prompts are token ids. A request generates
one block. Measured is the time from the start of its first step to the end of its last one, as the
median of the rounds, with the two kinds in turns. One request puts the prefix into the cache. Every
other request with the prefix has its own prompt after it.

Written: prefix_cache.json.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from tqdm import tqdm

from benchmarks import harness, windows
from benchmarks.harness import positive
from benchmarks.shapes import BLOCK_FAMILIES, Shape

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

PREFIX_SEED = 1_000_000  # a seed that no prompt has
WARM_UP = 3  # rounds that are not measured


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    first_ms, times = measure(options)
    medians = {kind: statistics.median(seconds) for kind, seconds in times.items()}
    print(f"the prefix for the first time: {first_ms:.2f} ms")
    for kind, median in medians.items():
        print(f"{kind:>16}: {median:8.2f} ms to the first block (fastest {min(times[kind]):.2f})")
    print(f"ratio: {medians['shared prefix'] / medians['short prompt']:.3f}")
    harness.write("prefix_cache", options, first_ms=first_ms, times_ms=times)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("prefix_cache", __doc__)
    parser.shape("llada2", BLOCK_FAMILIES)
    parser.option("--prefix", 8192, "tokens that requests share", type=positive)
    parser.option("--prompt", 32, "tokens after the prefix, or alone", type=positive)
    parser.option("--block-length", None, "default: as released", type=positive)
    parser.option("--steps-per-block", 4, type=positive)
    parser.option("--rounds", 20, type=positive)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> tuple[float, dict[str, list[float]]]:
    """Measure milliseconds of the request that fills the cache, and of both kinds of requests."""
    shape = Shape.of(harness.configuration_of(options))
    block_length = options.block_length or shape.block_length
    parameters = windows.parameters_of(shape, block_length, 1, options.steps_per_block)
    prefix = in_process.random_prompt(options.prefix, shape.vocab_size, PREFIX_SEED)
    times: dict[str, list[float]] = {"shared prefix": [], "short prompt": []}
    with in_process.engine_of(
        options,
        max_model_len=options.prefix + options.prompt + 2 * block_length,
    ) as (llm, runner):

        def time_of(seed: int, before: Sequence[int] = ()) -> float:
            own = in_process.random_prompt(options.prompt, shape.vocab_size, seed)
            return to_first_block_ms(llm, runner, [*before, *own], parameters)

        first_ms = time_of(0, prefix)
        for number in tqdm(range(WARM_UP + options.rounds), leave=False, disable=None):
            seeds = 1 + 2 * number, 2 + 2 * number
            timed = time_of(seeds[0], prefix), time_of(seeds[1])
            if number >= WARM_UP:
                for kind, time_ms in zip(times, timed, strict=True):
                    times[kind].append(time_ms)
    return first_ms, times


def to_first_block_ms(
    llm: Any, runner: Any, prompt: Sequence[int], parameters: dict[str, Any]
) -> float:
    """Measure the milliseconds from a lone request's first step to the end of its last."""
    _, seconds = windows.timed_requests(llm, runner, [prompt], parameters)
    return 1000 * seconds


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long steps take beside how long the planner says they take.

    benchmarks/predictions.py [--families llada llada-moe] [--lengths 32 256 1024 16384 65536]
        [--requests 1 8] [--num-layers 8] [--pool-gib 4] [--output-dir results/predictions]

Each family has the shape of its released model and random weights. Requests have one block of 32
masked positions behind a random prompt and no cache; block-causal families compute a block behind a
prompt that is kept. With --pool-gib steps are cut as such a pool wants it. The rates that the
planner goes by are those that the engine has measured at its start.

Written: predictions.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from benchmarks import harness
from benchmarks.harness import Table, positive
from benchmarks.shapes import BLOCK_FAMILIES, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

COLUMNS = {"family": ">10", "T": ">9", "N": ">3", "planned ms": ">11.2f", "step ms": ">11.2f"}
COLUMNS |= {"planned / step": ">14.3f"}
BLOCK = 32


@dataclass(frozen=True)
class Row:
    """Steps of `num_requests` requests of `length` positions each; medians."""

    family: str
    length: int
    num_requests: int
    planned_ms: float
    step_ms: float

    @property
    def ratio(self) -> float:
        """What was planned, of what it took."""
        return self.planned_ms / self.step_ms


@harness.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse_arguments(arguments)
    table = Table(COLUMNS, "family length num_requests planned_ms step_ms ratio")
    rates: dict[str, Any] = {}
    if options.pool_gib:
        os.environ["VLLM_ACTIVATION_POOL_SIZE_BYTES"] = str(int(options.pool_gib * 2**30))
    for family in options.families:
        one = argparse.Namespace(**vars(options) | {"family": family, "size": None})
        for row in rows_of(one, rates):
            table.add(row)
    harness.write("predictions", options, table.rows, rates=rates)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = harness.Parser("predictions", __doc__)
    parser.option("--families", ("llada", "llada-moe"), choices=harness.FAMILIES)
    parser.option("--lengths", (32, 256, 1024, 16_384, 65_536), "positions", type=positive)
    parser.option("--requests", (1,), "at once", type=positive)
    parser.option("--steps", 5, "of a case", type=positive)
    parser.option("--pool-gib", 0.0, "of activations (default: what is free)")
    parser.scale()
    return parser.parse_args(arguments)


def rows_of(options: argparse.Namespace, rates: dict[str, Any]) -> Iterator[Row]:
    """All cases of a family; adds what its planner goes by to `rates`."""
    shape = Shape.of(harness.configuration_of(options))
    with in_process.engine_of(
        options,
        max_model_len=max(options.lengths),
        max_num_seqs=max(options.requests),
        additional_config={"dllm": {"longest_pause_ms": 0}},
    ) as (llm, runner):
        rates[options.family] = runner.planner.rates._asdict()
        for length in options.lengths:
            for count in options.requests:
                prompts = in_process.random_prompts(count, length - BLOCK, shape.vocab_size)
                asked = {"gen_length": BLOCK, "steps": min(options.steps, BLOCK)}
                if options.family not in BLOCK_FAMILIES:
                    asked |= {"algorithm": "semi_ar", "block_length": BLOCK}
                in_process.run_requests(llm, prompts, asked)  # kernels are chosen and compiled
                steps = in_process.timed_steps(llm, runner, prompts, asked)
                planned_ms = statistics.median(step.planned_ms for step in steps)
                step_ms = statistics.median(step.step_ms for step in steps)
                yield Row(options.family, length, count, planned_ms, step_ms)


if __name__ == "__main__":
    sys.exit(main())

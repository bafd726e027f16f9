#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a block-causal model with commit fusion and without it.

    benchmarks/commit_fusion.py [--family sdar] [--size 8b] [--block-length 4]
        [--steps-per-block 2] [--requests 1 8 16 128] [--context 1024] [--gen-length 128]
        [--output-dir results/commit_fusion]

With fusion, one forward computes the final keys and values of a finished block together with the
masked rows of the next block. Without it (VLLM_DLLM_COMMIT_FUSION=0) the finished block takes a
separate forward. The model has a released shape and random weights. The two engines run one after
the other in this process. Requests start together, after prompts whose keys and values are in the
prefix cache.

    tokens/s        tokens of all answers over the time from the first step to the end of the last,
                    the fastest of the rounds
    tokens/forward  of one request: fixed by the number of forwards per block
    forwards/s      steps of the engine per second

Written: commit_fusion.json.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from benchmarks import harness, windows
from benchmarks.harness import Table, positive
from benchmarks.shapes import BLOCK_FAMILIES, Shape
from benchmarks.windows import Windows

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

VARIABLE = "VLLM_DLLM_COMMIT_FUSION"
COLUMNS = {"requests": ">8", "fused": ">5", "tokens/s": ">9.1f"}
COLUMNS |= {"tokens/forward": ">14.3f", "forwards/s": ">10.1f"}


@dataclass(frozen=True)
class Row:
    """Result for one number of requests."""

    num_requests: int
    is_fused: bool
    num_tokens: int
    num_forwards: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all requests together."""
        return self.num_tokens / self.seconds

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that one request commits per forward."""
        return self.num_tokens / self.num_requests / self.num_forwards

    @property
    def forwards_per_s(self) -> float:
        """Forwards per second of all requests together."""
        return self.num_forwards / self.seconds


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    attributes = "num_requests is_fused tokens_per_s tokens_per_forward forwards_per_s"
    table = Table(COLUMNS, attributes, 2 * len(options.requests))
    for is_fused in (True, False):
        measure(options, is_fused, table)
    half = len(options.requests)
    for fused, plain in zip(table.rows[:half], table.rows[half:], strict=True):
        gain = fused.tokens_per_s / plain.tokens_per_s
        print(f"{fused.num_requests:>8} requests: {gain:.3f} x the tokens/s without fusion")
    harness.write("commit_fusion", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("commit_fusion", __doc__)
    parser.shape("sdar", [family for family in BLOCK_FAMILIES if family != "fast-dllm"])
    parser.option("--block-length", 4)
    parser.option("--steps-per-block", 2)
    parser.option("--requests", [1, 8, 16, 128], "at once", type=positive)
    parser.option("--context", 1024, "tokens of every prompt")
    parser.option("--gen-length", 128, "tokens of every answer")
    parser.option("--rounds", 3, "measured, after one that is not", type=positive)
    options = parser.parse_args(arguments)
    if options.gen_length % options.block_length:
        parser.error("--gen-length: wanted whole blocks")
    return options


def measure(options: argparse.Namespace, is_fused: bool, table: Table) -> None:
    """Measure a row for every number of requests."""
    os.environ[VARIABLE] = str(int(is_fused))
    shape = Shape.of(harness.configuration_of(options))
    num_blocks = options.gen_length // options.block_length
    parameters = windows.parameters_of(
        shape, options.block_length, num_blocks, options.steps_per_block
    )
    with in_process.engine_of(
        options,
        max_model_len=options.context + options.gen_length + options.block_length,
        max_num_seqs=max(options.requests),
    ) as (llm, runner):
        for num_requests in options.requests:
            case = Windows(options.context, options.block_length, num_requests)
            prompts = windows.prompts_of(shape, case)
            rounds = [
                windows.timed_requests(llm, runner, prompts, parameters)
                for _ in range(options.rounds + 1)
            ]
            num_forwards, seconds = min(rounds[1:], key=lambda step: step[1])
            num_tokens = num_requests * options.gen_length
            table.add(Row(num_requests, is_fused, num_tokens, num_forwards, seconds))
    del os.environ[VARIABLE]


if __name__ == "__main__":
    sys.exit(main())

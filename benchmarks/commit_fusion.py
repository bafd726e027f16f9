#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of a block-causal model with commit fusion and without it.

    benchmarks/commit_fusion.py [--family sdar] [--size 8b] [--block-length 4]
        [--steps-per-block 2] [--requests 1 8 16 128] [--context 1024] [--gen-length 128]
        [--output-dir results/commit_fusion]

With fusion, a forward computes the final keys and values of a finished block and the masked rows of
the next one together; without it (VLLM_DLLM_COMMIT_FUSION=0) the finished block takes a forward of
its own. Released shape, random weights, one engine after the other in this process; requests start
together behind prompts whose keys and values are in the prefix cache.

    tokens/s        tokens of all answers over the time from the first step to the end of the last,
                    the fastest of the rounds
    tokens/forward  of one request: given, as so many forwards are asked for a block
    forwards/s      steps of the engine a second

Written: commit_fusion.json.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import in_process  # noqa: E402  # isort: skip  (before torch and vllm)

from benchmarks import harness, windows  # noqa: E402
from benchmarks.shapes import BLOCK_FAMILIES, Shape  # noqa: E402
from benchmarks.windows import Windows  # noqa: E402

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

VARIABLE = "VLLM_DLLM_COMMIT_FUSION"
HEADER = f"{'requests':>8} {'fused':>5} | {'tokens/s':>9} {'tokens/forward':>14} {'forwards/s':>10}"


@dataclass(frozen=True)
class Row:
    """What one number of requests gave."""

    num_requests: int
    is_fused: bool
    num_tokens: int
    num_forwards: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return self.num_tokens / self.seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse_arguments(arguments)
    print(HEADER)
    rows = [row for is_fused in (True, False) for row in measure(options, is_fused)]
    for fused in rows[: len(options.requests)]:
        plain = next(r for r in rows if r.num_requests == fused.num_requests and not r.is_fused)
        gain = fused.tokens_per_s / plain.tokens_per_s
        print(f"{fused.num_requests:>8} requests: fused {gain:.3f} x the tokens/s of not")
    harness.write("commit_fusion", options, rows=list(map(asdict, rows)))
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    fusing = [family for family in BLOCK_FAMILIES if family != "fast-dllm"]
    parser = harness.parser_of("commit_fusion", "Commit fusion on and off.", fusing, "sdar")
    parser.add_argument("--block-length", type=int, default=4)
    parser.add_argument("--steps-per-block", type=int, default=2)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 16, 128], metavar="N")
    parser.add_argument("--context", type=int, default=1024, help="tokens of every prompt")
    parser.add_argument("--gen-length", type=int, default=128, help="tokens of every answer")
    parser.add_argument("--rounds", type=int, default=3, help="measured, after one that is not")
    options = parser.parse_args(arguments)
    if options.gen_length % options.block_length or min(*options.requests, options.rounds) < 1:
        parser.error("wanted --gen-length in whole blocks, --requests and --rounds from 1")
    return options


def measure(options: argparse.Namespace, is_fused: bool) -> list[Row]:
    """A row for every number of requests, printed as they come."""
    os.environ[VARIABLE] = str(int(is_fused))
    shape = Shape.of(harness.configuration_of(options))
    rows = []
    with (
        harness.checkpoint_of(options) as folder,
        in_process.engine(
            folder,
            dummy_weights=True,
            dtype=options.dtype,
            max_model_len=options.context + options.gen_length + options.block_length,
            max_num_seqs=max(options.requests),
        ) as (llm, runner),
    ):
        for num_requests in options.requests:
            case = Windows(options.context, options.block_length, num_requests)
            rounds = [run(llm, runner, shape, case, options) for _ in range(options.rounds + 1)]
            num_forwards, seconds = min(rounds[1:], key=lambda found: found[1])
            num_tokens = num_requests * options.gen_length
            rows.append(Row(num_requests, is_fused, num_tokens, num_forwards, seconds))
            print(line_of(rows[-1]), flush=True)
    del os.environ[VARIABLE]
    return rows


def run(
    llm: Any, runner: Any, shape: Shape, case: Windows, options: argparse.Namespace
) -> tuple[int, float]:
    """Steps of one round, and the seconds from the first one's start to the last one's end."""
    num_blocks = options.gen_length // options.block_length
    parameters = windows.parameters_of(
        shape, options.block_length, num_blocks, options.steps_per_block
    )
    return windows.timed_requests(llm, runner, windows.prompts_of(shape, case), parameters)


def line_of(row: Row) -> str:
    """One row of the printed table."""
    per_forward = row.num_tokens / row.num_requests / row.num_forwards
    return (
        f"{row.num_requests:>8} {'yes' if row.is_fused else 'no':>5} | {row.tokens_per_s:>9.1f} "
        f"{per_forward:>14.3f} {row.num_forwards / row.seconds:>10.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())

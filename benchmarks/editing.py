#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time to revise a text, compared with the time to generate a text of this length.

    benchmarks/editing.py [--family llada] [--context 256] [--tokens 256] [--block-length 32]
        [--steps 6] [--rounds 3] [--output-dir results/editing]
    benchmarks/editing.py --family llada2 --context 128 --tokens 512

The model has a released shape and random weights, so it would replace every token. Therefore the
request states what changes. A request has a random prompt of --context tokens and a random text of
--tokens tokens; nothing else is in the engine. The cases are

    unchanged  the text is scored, and no token is unlikely enough
    block      one block of the text consists of masks, which are filled in --steps steps
    spread     every eighth token becomes a mask again, and a step fills a block (families with full
               attention only)
    generated  no text: masks for all tokens, and two tokens per step

LLaDA2 runs `joint_threshold`, which LLaDA2.1 uses: it reads the text and repairs blocks. Other
families mask tokens to score them.

    passes   forward passes of a request
    ms       from the request to its answer, offline; median of the rounds
    share    of the time of `generated`

Written: editing.json.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from benchmarks import harness
from benchmarks.harness import Table, positive
from benchmarks.shapes import Shape
from vllm.diffusion.config import served_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

COLUMNS = {"case": "<10", "passes": ">6", "ms": ">9.2f", "share": ">7.3f"}
ATTRIBUTES = "case num_forwards ms share"
SCANNING = ("llada2",)  # families that read a text to find wrong tokens
IMPROBABLE = 1e-30  # every token is more likely
MAX_ROWS = 8192  # rows of a step, as a server has by default
SPREAD = 1 / 8  # share of the tokens that are masked again


@dataclass(frozen=True)
class Row:
    """Result of one case."""

    case: str
    num_forwards: int
    ms: float
    share: float


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    shape = Shape.of(harness.configuration_of(options))
    settings: dict[str, Any] = {"max_model_len": options.context + options.tokens}
    settings |= {"max_num_seqs": 1, "max_num_batched_tokens": MAX_ROWS}
    # No other request waits, so no step is cut.
    settings["additional_config"] = {"dllm": {"longest_pause_ms": 0}}
    with in_process.engine_of(options, **settings) as (llm, _):
        mask_id = served_model(llm.llm_engine.vllm_config).ids.mask
        cases = cases_of(options, shape, mask_id)
        table = Table(COLUMNS, ATTRIBUTES, len(cases))
        results = {name: measure(options, llm, shape, cases[name]) for name in cases}
    for name, (num_forwards, ms) in results.items():
        table.add(Row(name, num_forwards, ms, ms / results["generated"][1]))
    harness.write("editing", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("editing", __doc__)
    parser.shape("llada")
    parser.option("--context", 256, "tokens of the prompt", type=positive)
    parser.option("--tokens", 256, "tokens of the text", type=positive)
    parser.option("--block-length", 32, "tokens of a block", type=positive)
    parser.option("--steps", 6, "steps that fill a block", type=positive)
    parser.option("--rounds", 3, "measured requests of each case", type=positive)
    options = parser.parse_args(arguments)
    if options.tokens % options.block_length:
        parser.error("--tokens: wanted a multiple of --block-length")
    return options


def cases_of(options: argparse.Namespace, shape: Shape, mask_id: int) -> dict[str, dict[str, Any]]:
    """Return the parameters of a request for each case."""
    text = in_process.random_prompt(options.tokens, shape.vocab_size, seed=1)
    length = options.block_length
    first = options.tokens // length // 2 * length  # position of a block in the middle
    holed = [*text[:first], *[mask_id] * length, *text[first + length :]]
    given = {"gen_length": options.tokens, "block_length": length}
    if options.family in SCANNING:
        given["algorithm"] = "joint_threshold"
        nothing = {"editing_threshold": 1.0, "max_post_steps": 0}
        filled = {"threshold": 1.0, "num_to_transfer": -(-length // options.steps)}
        return {
            "unchanged": {**given, **nothing, "canvas_token_ids": text},
            "block": {**given, **nothing, **filled, "canvas_token_ids": holed},
            "generated": {**given, **nothing, "threshold": 1.0, "num_to_transfer": 2},
        }
    given["algorithm"] = "semi_ar"
    num_blocks = options.tokens // length
    if not shape.block_length:
        given["cache"] = "dual"
    two = {"steps": num_blocks * length // 2}
    cases = {
        "unchanged": {**given, **two, "edit_threshold": IMPROBABLE, "canvas_token_ids": text},
        "block": {
            **given,
            "steps": num_blocks * options.steps,
            "noise": 0.0,
            "canvas_token_ids": holed,
        },
        "spread": {
            **given,
            "steps": num_blocks,
            "noise": SPREAD,
            "edit_threshold": 1.0,
            "canvas_token_ids": text,
        },
        "generated": {**given, **two},
    }
    if shape.block_length:
        del cases["spread"]
    return cases


def measure(
    options: argparse.Namespace, llm: Any, shape: Shape, parameters: dict[str, Any]
) -> tuple[int, float]:
    """Return forward passes and milliseconds of a request, after a warm-up."""
    times, num_forwards = list[float](), 0
    for number in range(1 + options.rounds):
        # Other tokens, because the keys and values of a prompt may be in shared pages.
        prompt = in_process.random_prompt(options.context, shape.vocab_size, seed=10 + number)
        started = time.perf_counter()
        (output,) = in_process.run_requests(llm, [prompt], parameters)
        if number:
            times.append(1000 * (time.perf_counter() - started))
        num_forwards = harness.report_of(output)["num_forwards"]
    return num_forwards, statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())

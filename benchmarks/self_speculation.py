#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of self-speculation with a fixed number of confirmed drafts, and one by one.

    benchmarks/self_speculation.py [--size 8b] [--accepted 8] [--block-length 32] [--context 1024]
        [--gen-length 256] [--clients 1] [--rounds 5] [--output-dir results/self_speculation]

The model has the released shape of Nemotron-Labs-Diffusion and random weights, so its drafts are
noise. Therefore the causal forward is made to confirm exactly the first `--accepted` drafts of
every block. Each round then gives one token more than that, in two forwards. Measured is the time
from the start of the first step to the end of the last, including prompts, whose keys and values
are kept; the median of the rounds.

Written: self_speculation.json.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from tqdm import tqdm

from benchmarks import harness, windows
from benchmarks.harness import positive
from benchmarks.shapes import Shape
from vllm.diffusion.decoding import CAUSAL_RULES
from vllm.diffusion.decoding.self_speculation import SelfSpeculation

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vllm.diffusion.decoding import Candidates, Commit, ForwardTarget
    from vllm.diffusion.decoding.base import Array

ALGORITHMS = ("self_speculation", "autoregressive")


class Confirming(SelfSpeculation):
    """Confirms the first `accepted` drafts of a block, whatever the model predicts."""

    accepted: ClassVar[int] = 0
    _block: Array | None = None  # the drafts that a causal forward verifies

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        target = super().prepare(tokens)
        is_looked_at = target is not None and target.is_causal
        self._block = tokens[target.eligible[:-1]].copy() if target and is_looked_at else None
        return target

    def decide(self, candidates: Candidates) -> Commit:
        if self._block is not None and self._block.size:
            said, count = candidates.tokens.copy(), min(self.accepted, self._block.size)
            said[:count] = self._block[:count]
            said[count : self._block.size] = self._block[count:] + 1  # any other token
            candidates = candidates._replace(tokens=said)
        return super().decide(candidates)


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    rates = measure(options)
    medians = {name: statistics.median(measured) for name, measured in rates.items()}
    for name, median in medians.items():
        print(f"{name:>16}: {median:9.1f} tokens/s (best {max(rates[name]):.1f})")
    print(f"ratio: {medians['self_speculation'] / medians['autoregressive']:.2f}")
    harness.write("self_speculation", options, tokens_per_s=rates)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("self_speculation", __doc__)
    parser.shape("nemotron", ("nemotron",))
    parser.option("--accepted", 8, "drafts of a block that are confirmed", type=int)
    parser.option("--block-length", 32, type=positive)
    parser.option("--context", 1024, "tokens of a prompt", type=positive)
    parser.option("--gen-length", 256, "tokens of an answer", type=positive)
    parser.option("--clients", 1, "requests at once", type=positive)
    parser.option("--rounds", 5, type=positive)
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure the tokens per second of all clients together, by algorithm and round."""
    shape = Shape.of(harness.configuration_of(options))
    Confirming.accepted = options.accepted
    prompts = in_process.random_prompts(options.clients, options.context, shape.vocab_size)
    parameters = {"gen_length": options.gen_length, "block_length": options.block_length}
    rates: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
    length = options.context + options.gen_length + options.block_length
    with (
        patch.dict(CAUSAL_RULES, self_speculation=Confirming),
        in_process.engine_of(
            options, max_model_len=length, max_num_seqs=max(options.clients, 2)
        ) as (llm, runner),
    ):
        for number in tqdm(range(1 + options.rounds), leave=False, disable=None):
            for name in ALGORITHMS:
                rate = rate_of(llm, runner, prompts, {**parameters, "algorithm": name})
                if number:  # the first round is a warm-up
                    rates[name].append(rate)
    return rates


def rate_of(
    llm: Any, runner: Any, prompts: Sequence[Sequence[int]], extra: dict[str, Any]
) -> float:
    """Measure the tokens per second of requests that run at once."""
    own = {name: value for name, value in extra.items() if name != "block_length"}
    parameters = own if extra["algorithm"] == "autoregressive" else extra
    _, seconds = windows.timed_requests(llm, runner, prompts, parameters)
    return len(prompts) * float(extra["gen_length"]) / seconds


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of `introspective` decoding with a given share of right drafts.

    benchmarks/introspective.py [--share 0.8] [--stride 4] [--branches last] [--clients 1 32 64]
        [--context 256] [--gen-length 256] [--rounds 3] [--output-dir results/introspective]

The model has the released shape of I-DLM and random weights, so its drafts are noise. Therefore the
benchmark decides which drafts are right: each one with the probability --share. A rate is the
median over the rounds. It includes the prompts, whose keys and values are kept.

    rows        median rows of a step, of all clients
    tokens      tokens of a forward pass of one client
    tokens/s    rate of all clients together
    one by one  the same rate with `autoregressive`, measured in turns with the other

Written: introspective.json.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from benchmarks import harness
from benchmarks.harness import Table, positive
from vllm.diffusion.decoding import CAUSAL_RULES
from vllm.diffusion.decoding.introspective import Introspective

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from vllm.diffusion.decoding import Candidates, Commit

COLUMNS = {"clients": ">7", "rows": ">6", "tokens": ">6.2f", "step ms": ">8.2f"}
COLUMNS |= {"tokens/s": ">9.1f", "one by one": ">10.1f", "ratio": ">6.2f"}


class Accepting(Introspective):
    """Finds each draft right with the same probability, whatever the model predicts."""

    share: ClassVar[float] = 0.0
    draws: ClassVar[random.Random] = random.Random(0)

    def decide(self, candidates: Candidates) -> Commit:
        tokens = candidates.tokens.copy()
        for place, draft in enumerate(self._drafts):
            is_right = self.draws.random() < self.share
            tokens[place] = draft if is_right else draft ^ 1  # another token
        return super().decide(candidates._replace(tokens=tokens))


@dataclass(frozen=True)
class Row:
    """Result for one number of clients."""

    clients: int
    rows: int
    tokens_per_forward: float
    step_ms: float
    tokens_per_s: float
    one_by_one: float
    ratio: float


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    Accepting.share = options.share
    CAUSAL_RULES["introspective"] = Accepting
    attributes = "clients rows tokens_per_forward step_ms tokens_per_s one_by_one ratio"
    table = Table(COLUMNS, attributes, len(options.clients))
    length = options.context + options.gen_length + 2 * options.stride
    with in_process.engine_of(options, max_model_len=length, max_num_seqs=max(options.clients)) as (
        llm,
        runner,
    ):
        for clients in options.clients:
            table.add(measured(options, llm, runner, clients))
    harness.write("introspective", options, table.rows)


def measured(options: argparse.Namespace, llm: Any, runner: Any, clients: int) -> Row:
    """Measure both algorithms in turns; the first round is a warm-up."""
    prompts = in_process.random_prompts(clients, options.context, runner.model.config.vocab_size)
    count = clients * options.gen_length
    ours = {"gen_length": options.gen_length, "algorithm": "introspective"}
    ours |= {"stride": options.stride, "draft_branches": options.branches}
    plain = {"gen_length": options.gen_length, "algorithm": "autoregressive"}
    rates: dict[str, list[float]] = {"introspective": [], "autoregressive": []}
    for number in range(1 + options.rounds):
        steps = in_process.timed_steps(llm, runner, prompts, ours)
        plain_steps = in_process.timed_steps(llm, runner, prompts, plain)
        if number:
            rates["introspective"].append(count / in_process.seconds_of(steps))
            rates["autoregressive"].append(count / in_process.seconds_of(plain_steps))
    decoding = [step for step in steps if step.num_rows < options.context]
    ours_per_s, plain_per_s = (statistics.median(found) for found in rates.values())
    return Row(
        clients,
        round(statistics.median(step.num_rows for step in decoding)),
        count / sum(step.num_requests for step in steps),
        statistics.median(step.step_ms for step in decoding),
        ours_per_s,
        plain_per_s,
        ours_per_s / plain_per_s,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("introspective", __doc__)
    parser.shape("idlm", ("idlm",))
    parser.option("--share", 0.8, "probability that a draft is right", type=float)
    parser.option("--stride", 4, "tokens of a forward pass, at most", type=positive)
    parser.option("--branches", "last", "draft_branches of the requests", choices=("last", "all"))
    parser.option("--clients", [1, 32, 64], "requests at once", type=positive)
    parser.option("--context", 256, "tokens of a prompt", type=positive)
    parser.option("--gen-length", 256, "tokens of an answer", type=positive)
    parser.option("--rounds", 3, type=positive)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

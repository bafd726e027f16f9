#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of `introspective` decoding with a given share of right drafts.

    benchmarks/introspective.py [--share 0.8] [--stride 4] [--branches last] [--clients 1 32 64]
        [--context 256] [--gen-length 256] [--rounds 3] [--draft-rank 128]
        [--output-dir results/introspective]

The model has the released shape of I-DLM and random weights, so its drafts are noise. Therefore the
benchmark decides which drafts are right: each one with the probability --share. A rate is the
median over the rounds. It includes the prompts, whose keys and values are kept.

    rows        median rows of a step, of all clients
    tokens      tokens of a forward pass of one client
    tokens/s    rate of all clients together
    one by one  the same rate with `autoregressive`, measured in turns with the other

With --draft-rank, a second engine has a random adapter of this rank for drafts, on all matrices of
a layer. Both engines take turns, and the table has a line for each of them.

Written: introspective.json.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)


from benchmarks import harness
from benchmarks.harness import Table, positive
from benchmarks.random_weights import write_adapter
from vllm.diffusion.decoding import CAUSAL_RULES
from vllm.diffusion.decoding.introspective import Introspective

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from benchmarks.in_process import Step
    from vllm.diffusion.decoding import Candidates, Commit

COLUMNS = {"rank": ">4", "clients": ">7", "rows": ">6", "tokens": ">6.2f", "step ms": ">8.2f"}
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


@dataclass
class Rounds:
    """The steps of both algorithms, round by round."""

    steps: list[list[Step]] = field(default_factory=list)
    plain_steps: list[list[Step]] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """Result of one engine for one number of clients; the rank is that of the drafts' adapter."""

    rank: int
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
    attributes = "rank clients rows tokens_per_forward step_ms tokens_per_s one_by_one ratio"
    ranks = [0, options.draft_rank] if options.draft_rank else [0]
    table = Table(COLUMNS, attributes, len(ranks) * len(options.clients))
    with ExitStack() as stack:
        stack.enter_context(patch.dict(CAUSAL_RULES, introspective=Accepting))
        engines = {rank: stack.enter_context(engine_of(options, rank)) for rank in ranks}
        for clients in options.clients:
            for row in measured(options, engines, clients):
                table.add(row)
    harness.write("introspective", options, table.rows)


@contextmanager
def engine_of(options: argparse.Namespace, rank: int) -> Iterator[Any]:
    """Yield (LLM, model runner); with an adapter for drafts unless its rank is 0."""
    length = options.context + options.gen_length + 2 * options.stride
    settings = {"max_model_len": length, "max_num_seqs": max(options.clients)}
    with tempfile.TemporaryDirectory() as folder:
        if rank:
            adapter = Path(folder, "adapter")
            write_adapter(adapter, harness.configuration_of(options), rank, options.dtype)
            settings["additional_config"] = {"dllm": {"draft_adapter": str(adapter)}}
        with in_process.engine_of(options, **settings) as engine:
            yield engine


def measured(options: argparse.Namespace, engines: dict[int, Any], clients: int) -> Iterator[Row]:
    """Measure both algorithms with each engine in turns; the first round is a warm-up."""
    count = clients * options.gen_length
    ours = {"gen_length": options.gen_length, "algorithm": "introspective"}
    ours |= {"stride": options.stride, "draft_branches": options.branches}
    plain = {"gen_length": options.gen_length, "algorithm": "autoregressive"}
    timed = {rank: Rounds() for rank in engines}
    for number in range(1 + options.rounds):
        for rank, (llm, runner) in engines.items():
            vocab_size = runner.model.config.vocab_size
            prompts = in_process.random_prompts(clients, options.context, vocab_size)
            steps = in_process.timed_steps(llm, runner, prompts, ours)
            plain_steps = in_process.timed_steps(llm, runner, prompts, plain)
            if number:
                timed[rank].steps.append(steps)
                timed[rank].plain_steps.append(plain_steps)
    for rank, rounds in timed.items():
        steps = [step for round_ in rounds.steps for step in round_]
        decoding = [step for step in steps if step.num_rows < options.context]
        per_s, plain_per_s = (
            statistics.median(count / in_process.seconds_of(round_) for round_ in own)
            for own in (rounds.steps, rounds.plain_steps)
        )
        yield Row(
            rank,
            clients,
            round(statistics.median(step.num_rows for step in decoding)),
            options.rounds * count / sum(step.num_requests for step in steps),
            statistics.median(step.step_ms for step in decoding),
            per_s,
            plain_per_s,
            per_s / plain_per_s,
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
    parser.option("--draft-rank", 0, "rank of an adapter for drafts; 0 for none", type=int)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

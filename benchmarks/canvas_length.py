#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Price of a large max_tokens, and forward passes that find the length of a canvas.

    benchmarks/canvas_length.py [--family llada] [--size 8b] [--context 128] [--limit 4096]
        [--gen-length 256] [--end 60] [--clients 1 32] [--chosen 256]
        [--output-dir results/canvas_length]

The model has a released shape and random weights. Its logits are edited so that every answer ends
at the token --end. Each number of clients asks twice in every round: with `gen_length`, and with
`max_tokens` --limit alone, so that the canvas may grow. More than one client uses `cache: dual`.
Then one request with `canvas: daedal` lengthens its canvas to --chosen tokens before it fills it.

    tokens/s  tokens of the answers up to their end over the time from the first step to the last,
              the median of the rounds
    ratio     the same relative to `gen_length`
    steps     denoising steps of a request; with daedal as if a step tried one length
    forwards  forward passes of a request
    lengths   first and last length of the canvas, their number, and the forward passes that tried
              them

Written: canvas_length.json.
"""

from __future__ import annotations

import statistics
import sys
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

TEXT = 7  # the token of every position before the end
COLUMNS = {"clients": ">7", "canvas": "<10", "tokens/s": ">9.1f", "ratio": ">6.3f"}
COLUMNS |= {"steps": ">5", "forwards": ">8", "lengths": "<24"}


@dataclass(frozen=True)
class Row:
    """Result of one kind of canvas; `ratio` is None for the canvas that others are compared to."""

    clients: int
    canvas: str
    tokens_per_s: float
    ratio: float | None
    num_steps: int
    num_forwards: int
    lengths: str


class Case:
    """Requests to one engine whose answers end at a given token."""

    def __init__(self, options: argparse.Namespace, llm: Any, runner: Any) -> None:
        self._options, self._llm, self._runner = options, llm, runner
        self._vocab_size = Shape.of(harness.configuration_of(options)).vocab_size
        eos_id = served_model(llm.llm_engine.vllm_config).ids.eos
        # Every answer ends at the token --end.
        edits = {"min_tokens": options.end - 1, "logit_bias": {TEXT: 50.0, eos_id: 100.0}}
        self._ends: dict[str, Any] = edits

    def run(
        self, clients: int, length: int, parameters: dict[str, Any], **sampling: Any
    ) -> tuple[float, Any]:
        """Run requests whose answers have `length` tokens.

        Returns:
            tokens per second of all answers, and the report of one of them.
        """
        from vllm import SamplingParams

        prompts = in_process.random_prompts(clients, self._options.context, self._vocab_size)
        request = SamplingParams(
            temperature=0.0,
            max_tokens=parameters.get("max_tokens", self._options.gen_length),
            detokenize=False,
            extra_args={"num_speculative_states": 0, **parameters},
            **sampling,
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        with in_process.StepLog().attached(self._runner) as log:
            outputs = self._llm.generate(inputs, request, use_tqdm=False)
        reports = [harness.report_of(output) for output in outputs]
        if {len(output.outputs[0].token_ids) for output in outputs} != {length}:
            raise harness.BenchmarkError(f"an answer does not have {length} tokens")
        return clients * length / in_process.seconds_of(log.steps()), reports[0]

    def compared(self, clients: int, table: Table) -> None:
        """Measure a fixed canvas and one that may grow, in turns."""
        options = self._options
        shared = {"cache": "dual"} if clients > 1 else {}
        kinds: dict[str, dict[str, Any]] = {
            "gen_length": {"gen_length": options.gen_length, **shared},
            "grow": {"max_tokens": options.limit, **shared},
        }
        paces: dict[str, list[float]] = {name: [] for name in kinds}
        reports: dict[str, Any] = {}
        for number in range(options.rounds + 1):
            for name, parameters in kinds.items():
                pace, reports[name] = self.run(clients, options.end, parameters, **self._ends)
                if number:
                    paces[name].append(pace)
        fixed = statistics.median(paces["gen_length"])
        for name in kinds:
            pace = statistics.median(paces[name])
            ratio = None if name == "gen_length" else pace / fixed
            table.add(_row(clients, name, pace, ratio, reports[name]))

    def chosen(self, table: Table) -> None:
        """Measure the search for the length of a canvas, and the answer on it."""
        length = self._options.chosen
        # No certainty of the end reaches 2, so the canvas gets its longest length.
        parameters = {"canvas": "daedal", "max_tokens": length, "eos_threshold": 2.0}
        for _ in range(2):
            pace, report = self.run(1, length, parameters, ignore_eos=True)
        table.add(_row(1, "daedal", pace, None, report))


def _row(clients: int, name: str, pace: float, ratio: float | None, report: Any) -> Row:
    lengths = report.get("canvas_lengths", [])
    num_searches = len(lengths) - report["num_steps"] + report["num_forwards"]
    text = f"{lengths[0]} to {lengths[-1]}, {len(lengths)} in {num_searches}" if lengths else ""
    return Row(clients, name, pace, ratio, report["num_steps"], report["num_forwards"], text)


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    attributes = "clients canvas tokens_per_s ratio num_steps num_forwards lengths"
    table = Table(COLUMNS, attributes, 2 * len(options.clients) + 1)
    settings: dict[str, Any] = {
        "max_model_len": options.context + options.limit,
        "max_num_seqs": max(options.clients),
        # Long steps are not cut, so that all steps are timed.
        "additional_config": {"dllm": {"longest_pause_ms": 0}},
    }
    with in_process.engine_of(options, **settings) as (llm, runner):
        case = Case(options, llm, runner)
        for clients in options.clients:
            case.compared(clients, table)
        case.chosen(table)
    harness.write("canvas_length", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("canvas_length", __doc__)
    parser.shape("llada", ["llada", "dream", "llada-moe"])
    parser.option("--context", 128, "tokens of every prompt")
    parser.option("--limit", 4096, "max_tokens of the requests whose canvas may grow")
    parser.option("--gen-length", 256, "canvas of the requests that set it")
    parser.option("--end", 60, "tokens of every answer")
    parser.option("--chosen", 256, "tokens of the canvas that chooses its length")
    parser.option("--clients", [1, 32], "requests at once", type=positive)
    parser.option("--rounds", 3, "measured rounds, after a warm-up", type=positive)
    options = parser.parse_args(arguments)
    if options.end > options.gen_length:
        parser.error("--end: wanted at most --gen-length")
    return options


if __name__ == "__main__":
    sys.exit(main())

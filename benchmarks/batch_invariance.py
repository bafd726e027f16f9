#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of a denoising step with and without batch invariance, in turns.

    benchmarks/batch_invariance.py [--family llada] [--requests 1 1 64] [--rows 32 256 32]
        [--quantization fp8] [--tensor-parallel-size N] [--turns 2] [--rounds 6]
        [--num-layers N] [--output-dir results/batch_invariance]

The model has a released shape and random weights. A case is a number of concurrent requests, each
with a number of rows. Alone, a request computes its prompt and its canvas in every step (`cache:
none`). Several requests compute a block of that number of rows over kept keys (`cache: dual`; exact
ones for block-causal families). Engines without and with `batch_invariant` are started in turns.
On one H200, rounds of equal steps took from 3.7 to 5.7 ms in either mode. So the fastest of
--rounds rounds of an engine counts, and the fastest engine of --turns.

    usual      milliseconds of a step on the device without batch invariance
    invariant  the same with batch invariance
    ratio      the latter over the former
    spread     the largest ratio of the medians of two turns of the same kind

Written: batch_invariance.json.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from benchmarks import harness, windows
from benchmarks.harness import Table, positive
from benchmarks.shapes import Shape
from benchmarks.step_latency import kernel_lines
from vllm.diffusion import ops

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from benchmarks.in_process import Step

COLUMNS = {"family": "<12", "requests": ">8", "rows": ">6", "usual ms": ">9.3f"}
COLUMNS |= {"invariant": ">10.3f", "ratio": ">6.3f", "spread": ">7.3f"}
ATTRIBUTES = "family num_requests num_rows usual_ms invariant_ms ratio spread"
CONTEXT = 128  # positions before a block over kept keys
MIN_STEPS = 3


@dataclass(frozen=True)
class Case:
    """Concurrent requests, each with `num_rows` rows in a step."""

    num_requests: int
    num_rows: int

    def sizes(self, shape: Shape) -> tuple[int, int]:
        """Return the tokens of a request's prompt, and of its canvas."""
        if self.num_requests > 1:
            return CONTEXT, shape.block_length or self.num_rows
        canvas = shape.block_length or min(self.num_rows // 2, 32)
        return self.num_rows - canvas, canvas


@dataclass(frozen=True)
class Row:
    """Result of one case: rows of a step of all requests, and times in milliseconds."""

    family: str
    num_requests: int
    num_rows: int
    usual_ms: float
    invariant_ms: float
    ratio: float
    spread: float


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    cases = [Case(*case) for case in zip(options.requests, options.rows, strict=True)]
    times: dict[tuple[bool, Case], list[float]] = {}
    rows_of: dict[Case, int] = {}
    for _ in range(options.turns):
        for is_invariant in (False, True):
            for case, (rows, ms) in turn(options, cases, is_invariant=is_invariant).items():
                times.setdefault((is_invariant, case), []).append(ms)
                rows_of[case] = rows
    table = Table(COLUMNS, ATTRIBUTES)
    for case in cases:
        usual, invariant = (times[kind, case] for kind in (False, True))
        fastest = min(usual), min(invariant)
        spread = max(max(some) / min(some) for some in (usual, invariant))
        ratio = fastest[1] / fastest[0]
        numbers = (case.num_requests, rows_of[case], *fastest, ratio, spread)
        table.add(Row(options.family, *numbers))
    harness.write("batch_invariance", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("batch_invariance", __doc__)
    parser.shape("llada")
    parser.option("--requests", (1, 1, 64), "concurrent requests of each case", type=positive)
    parser.option("--rows", (32, 256, 32), "rows of each request, by case", type=positive)
    parser.option("--quantization", None, "fp8", type=str)
    parser.option("--tensor-parallel-size", 1, "ranks that divide the weights", type=positive)
    parser.option("--turns", 2, "engines of each kind", type=positive)
    parser.option("--rounds", 6, "repetitions of a case in an engine", type=positive)
    parser.option("--profile", False, "print the longest kernels of every case, too")
    options = parser.parse_args(arguments)
    if len(options.requests) != len(options.rows):
        parser.error("--requests and --rows: wanted a number of each for every case")
    if options.profile and options.tensor_parallel_size > 1:
        parser.error("--profile: wanted one rank, whose kernels run in this process")
    return options


def turn(
    options: argparse.Namespace, cases: Sequence[Case], *, is_invariant: bool
) -> dict[Case, tuple[int, float]]:
    """Return rows and milliseconds of a step of every case, in an engine of its own."""
    shape = Shape.of(harness.configuration_of(options))
    settings: dict[str, Any] = {"num_speculative_states": 0, "longest_pause_ms": 0}
    settings["batch_invariant"] = is_invariant
    length = max(sum(case.sizes(shape)) for case in cases)
    with (
        cublas_of_its_own(),
        in_process.engine_of(
            options,
            quantization=options.quantization,
            tensor_parallel_size=options.tensor_parallel_size,
            max_model_len=length + 64,
            max_num_seqs=max(case.num_requests for case in cases),
            additional_config={"dllm": settings},
        ) as (llm, runner),
    ):
        times = {}
        for case in cases:
            run = partial(steps_of, llm, runner, shape, case)
            times[case] = min((round_of(run()) for _ in range(options.rounds)), key=itemgetter(1))
            if options.profile:
                print("invariant" if is_invariant else "usual", case)
                print(*kernel_lines(in_process.kernel_times(run)), sep="\n")
        return times


@contextmanager
def cublas_of_its_own() -> Iterator[None]:
    """Give cuBLAS its workspace back, which batch-invariant engines take away, at the end."""
    yield
    ops.allow_workspace(True)


def round_of(steps: Sequence[Step]) -> tuple[int, float]:
    """Return the most common rows of a step of one round, and the median time of such steps.

    Raises:
        BenchmarkError: there are too few equal steps.
    """
    # The first steps also compute prompts, and requests may take turns.
    num_rows, count = Counter(step.num_rows for step in steps).most_common(1)[0]
    if count < MIN_STEPS:
        sizes = sorted({step.num_rows for step in steps})
        raise harness.BenchmarkError(f"wanted {MIN_STEPS} equal steps, got steps of {sizes} rows")
    times = [step.device_ms or step.step_ms for step in steps if step.num_rows == num_rows]
    return num_rows, statistics.median(times)


def steps_of(llm: Any, runner: Any, shape: Shape, case: Case) -> list[Step]:
    """Answer the requests of a case once, and return the steps."""
    context, canvas = case.sizes(shape)
    prompts = in_process.random_prompts(case.num_requests, context, shape.vocab_size)
    if case.num_requests > 1 or shape.block_length:
        parameters = windows.kept_parameters(shape, canvas, canvas)
    else:
        parameters = {"algorithm": "semi_ar", "steps": canvas}
        parameters |= {"gen_length": canvas, "block_length": canvas}
    return in_process.timed_steps(llm, runner, prompts, parameters)


if __name__ == "__main__":
    sys.exit(main())

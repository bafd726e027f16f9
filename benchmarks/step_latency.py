#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of one denoising step, compared with the hardware's floor and with plain PyTorch.

    benchmarks/step_latency.py [--families llada dream llada-moe] [--lengths 32 128 ... 16384]
        [--requests 1 8 32] [--quick] [--long] [--output-dir results/step_latency]
    benchmarks/step_latency.py --families llada2 sdar sdar-moe fast-dllm [--sizes mini 8b ...]
        [--requests 1 64 128] [--block-lengths 4 32] [--context 1024]

Each family has the shape of its released model (LLaDA-8B, Dream-7B, LLaDA-MoE-7B-A1B) and random
weights. A request has one block of 32 masked positions after a random prompt (16 if T is 32). There
is no cache, so every step recomputes all rows. Measured in one process, after a warm-up:

    step        from the engine's first instruction of a step to its results on the host
    device      between CUDA events around the same step
    planned     the planner's prediction for the step, from the rates that it uses
    interval    from the start of a step to the start of the next, including scheduling
    floor       the larger of two times: moving every weight once, at the bandwidth of a large copy;
                and computing all products, at the rate of an 8192 x 8192 x 8192 product, plus
                attention, at the rate of cuDNN. All rows pass all layers, logits are computed for
                32 rows per request, and experts count if a row uses them, on average over the
                steps. The three rates are measured in the same run.
    reference   the same step in plain PyTorch (benchmarks/plain_model.py): logits of all rows, one
                request after the other; "-" if it does not fit into memory

Block-causal families (LLaDA2.0-mini, SDAR-8B, SDAR-30B-A3B, Fast-dLLM v2 7B): a request has a block
after a prompt of --context tokens, whose keys and values are kept, and commits one token per step.
The floor is the sum over the stages of a forward, because they wait for each other. Each stage
takes the larger of the times to read its weights, or keys and values, and to compute. Routers are
drawn so that masked rows choose different experts. T is printed as context + block, and the experts
of a layer that any row uses are printed below. All requests are in one step. If a server would
process them in shares, one after the other, the time in which all requests have had a forward is
printed as well.

With --quantization every case is measured with the plain weights and with each quantisation, in one
run. The latter appear below as separate families ("llada fp8"), without a floor. --no-plain leaves
the plain weights out. --attention-dtype model fp8 also measures each with fp8 attention ("llada fp8
fp8 attention"), for one request, whatever its length.

Written: step_latency.json and step_latency.png.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

import torch
from make_dummy_checkpoint import PRESETS
from tiny_model.decoding import commit_quotas

from benchmarks import gpu_timing, harness, windows
from benchmarks.harness import BenchmarkError, Table, positive
from benchmarks.plain_model import counted_experts, denoise_step, random_model
from benchmarks.shapes import BLOCK_FAMILIES, Shape, forward_work
from benchmarks.windows import Windows
from vllm.diffusion.engine.worker.run_ahead import StepLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.in_process import Step
    from benchmarks.plain_model import PlainModel

SIZES = tuple(dict.fromkeys(size for _, size in PRESETS))
LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096, 16384)
LONG_LENGTH = 65536
QUICK_LENGTHS = (32, 256, 1024)
BLOCK = 32
MIN_STEPS = 3
COLUMNS = {"family": ">10", "T": ">8", "N": ">3", "step ms": ">9.2f", "min": ">9.2f"}
COLUMNS |= {"device": ">9.2f", "planned": ">9.2f", "interval": ">9.2f"}
COLUMNS |= {"floor": ">9.2f", "x floor": ">7.2f"}
COLUMNS |= {"reference": ">9.2f", "speed-up": ">8.2f"}
ATTRIBUTES = (
    "family rows num_requests step_ms step_min_ms device_ms planned_ms interval_ms floor_ms "
    "over_floor reference_ms speed_up"
)


@dataclass(frozen=True)
class Case:
    """Concurrent requests: `num_requests` of `length` rows each."""

    length: int
    num_requests: int

    @property
    def canvas(self) -> int:
        """Number of masked positions after the prompt, which form one block."""
        return min(BLOCK, self.length // 2)


@dataclass(frozen=True)
class Reference:
    """Plain step of one request; `touched_experts` is None for a dense model."""

    step_ms: float | None
    touched_experts: float | None


@dataclass(frozen=True)
class Row:
    """Result of one case; times in milliseconds, None if not measured.

    `length` is the number of rows of a step's window, and `context` that of the rows kept before
    it.
    """

    family: str
    length: int
    num_requests: int
    num_steps: int
    step_ms: float
    step_min_ms: float
    device_ms: float | None
    interval_ms: float
    floor_ms: float | None
    reference_ms: float | None
    touched_experts: float | None
    context: int = 0
    planned_ms: float = 0.0
    # Time of a forward of all requests if a server processes them in shares
    served_ms: float | None = None

    @property
    def rows(self) -> str:
        """Rows of a request, after the kept rows."""
        return f"{self.context}+{self.length}" if self.context else str(self.length)

    @property
    def over_floor(self) -> float | None:
        """Step time as a multiple of the floor."""
        return self.step_ms / self.floor_ms if self.floor_ms else None

    @property
    def speed_up(self) -> float | None:
        """Time of the reference as a multiple of the step time."""
        return self.reference_ms / self.step_ms if self.reference_ms else None


@harness.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    options = parse_arguments(arguments)
    table, ceilings = Table(COLUMNS, ATTRIBUTES), {}
    try:
        for family in options.families:
            sizes = [size for size in options.sizes if (family, size) in PRESETS]
            model = {"family": family, "size": next(iter(sizes), None)}
            measure = measure_windows if family in BLOCK_FAMILIES else measure_family
            measure(argparse.Namespace(**vars(options) | model), ceilings, table)
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; the families before are kept\n")
    if not table.rows:
        return 1
    harness.write("step_latency", options, table.rows, ceilings=ceilings)
    families = list(dict.fromkeys(row.family for row in table.rows))
    path, size = options.output_dir / "step_latency.png", (4.5 * len(families), 4)
    harness.draw(path, partial(paint, table.rows), 1, len(families), size, sharey=True)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("step_latency", __doc__)
    full = [family for family in harness.FAMILIES if family not in BLOCK_FAMILIES]
    parser.option("--families", full, choices=harness.FAMILIES)
    parser.option(
        "--sizes", (), "models other than the first of their family", choices=SIZES, type=str
    )
    parser.option("--lengths", (), "rows of a request, from 2", type=int)
    parser.option(
        "--requests", (), "requests at once (default: 1 8 32; windows 1 64 128)", type=positive
    )
    parser.option("--context", 1024, "prompt of a request of a block-causal family")
    parser.option("--block-lengths", (), "default: as released", type=positive)
    parser.option("--quick", False, "three lengths, few steps")
    parser.option("--long", False, f"with length {LONG_LENGTH}, too")
    parser.option("--max-rows", 16384, "leave out more rows of several requests")
    parser.option("--steps", 16, f"measured steps of a case, at most; from {MIN_STEPS}")
    parser.option("--seconds", 3.0, "longest time of a case (but at least three steps)")
    parser.option("--no-reference", False, "leave plain PyTorch out")
    help_text = "precision of the reference's softmax; LLaDA's published loop: that of the logits"
    precisions = ("logits", "float32", "float64")
    parser.option("--reference-confidence", "logits", help_text, choices=precisions)
    parser.option("--enforce-eager", False, "no CUDA graphs")
    parser.option("--profile", False, "print the longest kernels of every case, too")
    parser.option("--quantization", (), "kinds in addition to the plain weights", type=str)
    parser.option("--no-plain", False, "leave the plain weights out")
    parser.option(
        "--attention-dtype", ["model"], "attention of each kind", choices=("model", "fp8")
    )
    parser.scale()
    options = parser.parse_args(arguments)
    options.lengths = list(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS))
    if options.long:
        options.lengths.append(LONG_LENGTH)
    if min(options.lengths) < 2 or options.steps < MIN_STEPS:
        parser.error(f"wanted --lengths from 2 and --steps from {MIN_STEPS}")
    if options.quick:
        options.seconds = min(options.seconds, 1.0)
    return options


def cases_of(lengths: Sequence[int], requests: Sequence[int], max_rows: int) -> list[Case]:
    """Return all combinations whose rows fit; a lone request may have any number of rows."""
    return [
        Case(length, count)
        for count in requests
        for length in lengths
        if count == 1 or count * length <= max_rows
    ]


# --- measuring -------------------------------------------------------------------------------


def measure_family(options: argparse.Namespace, ceilings: dict[str, Any], table: Table) -> None:
    """Measure all cases of a family; add the measured rates to `ceilings`."""
    config = harness.configuration_of(options)
    shape, requests = Shape.of(config), options.requests or [1, 8, 32]
    references = measure_references(config, options)
    in_process.free_memory()
    cases = cases_of(options.lengths, requests, options.max_rows)
    floors = {case: floor_ms(shape, case, references, ceilings) for case in cases}
    in_process.free_memory()
    kinds = (*(() if options.no_plain else (None,)), *options.quantization)
    for quantization, attention in product(kinds, options.attention_dtype):
        in_fp8 = "" if attention == "model" else f"{attention} attention"
        name = " ".join(filter(None, [options.family, quantization, in_fp8]))
        dllm = {"longest_pause_ms": 0, "attention_dtype": attention, "fp8_attention_min_tokens": 1}
        with in_process.engine_of(
            options,
            quantization=quantization,
            max_model_len=max(options.lengths),
            max_num_seqs=max(requests),
            # All rows must fit into one step, which is measured
            max_num_batched_tokens=options.max_rows,
            additional_config={"dllm": dllm},  # steps must not be divided
            enforce_eager=options.enforce_eager,
        ) as (llm, runner):
            for case in cases:
                if in_fp8 and case.num_requests > 1:  # fp8 attention does not share its steps
                    continue
                run = partial(run_case, llm, runner, shape, case)
                steps = measure_steps(run, options)
                floor = None if quantization or in_fp8 else floors[case]
                table.add(row_of(name, case, steps, floor, references))
                print_kernels(options, table, run, len(steps))


def measure_windows(options: argparse.Namespace, ceilings: dict[str, Any], table: Table) -> None:
    """Measure all cases of a block-causal family; add the measured rates to `ceilings`."""
    shape = Shape.of(harness.configuration_of(options))
    block_lengths = options.block_lengths or [shape.block_length]
    requests = options.requests or [1, 64, 128]
    longest = max(length * windows.blocks_of(options.steps, length) for length in block_lengths)
    with in_process.engine_of(
        options,
        max_model_len=options.context + longest,
        max_num_seqs=max(requests),
        enforce_eager=options.enforce_eager,
    ) as (llm, runner):
        if shape.num_experts:
            alone = Windows(options.context, max(block_lengths), 1)
            run = partial(windows.run_windows, llm, runner, shape, alone, MIN_STEPS)
            windows.spread_experts(runner, alone.num_rows, run)
        loop = in_process.step_loop(llm)
        served, together = loop.limits, StepLimits(rows=sys.maxsize, requests=max(requests))
        for case in (Windows(options.context, b, n) for b in block_lengths for n in requests):
            # Put all requests into one step, even if a server would process them in shares.
            loop.limits = together
            run = partial(windows.run_windows, llm, runner, shape, case)
            steps, touched = measure_steps(run, options)[: options.steps], None
            if shape.num_experts:
                again = partial(run, len(steps))
                touched = windows.touched_experts(runner, case.num_rows, again)
            floor = windows.floor_ms(shape, case, steps, touched, ceilings)
            table.add(window_row(options.family, case, steps, floor, touched))
            if touched is not None:
                table.note(f"    {touched:.0f} of {shape.num_experts} experts a layer")
            print_kernels(options, table, run, len(steps))
            if case.num_requests > served.requests or case.num_rows > served.rows:
                loop.limits = served
                timed = windows.served_round(llm, runner, shape, case, len(steps))
                table.rows[-1] = replace(table.rows[-1], served_ms=timed.round_ms)
                table.note(served_line(timed, floor))


def measure_references(config: dict[str, Any], options: argparse.Namespace) -> dict[int, Reference]:
    """Measure the plain step of one request of each length, and the experts that its rows use.

    With --no-reference only the experts are measured, because the floor requires them.
    """
    shape = Shape.of(config)
    if options.no_reference and not shape.num_experts:
        return {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(config, device, getattr(torch, options.dtype))
    references = {}
    for length in sorted(options.lengths):
        row = masked_row(shape, Case(length, 1)).to(device)
        step_ms = None if options.no_reference else plain_step_ms(model, row, options)
        touched = touched_experts(model, row, options.steps) if shape.num_experts else None
        references[length] = Reference(step_ms, touched)
    return references


def plain_step_ms(
    model: PlainModel, row: torch.Tensor, options: argparse.Namespace
) -> float | None:
    """Measure the median time of the plain step of row [1, T]; None if out of memory."""
    precision = options.reference_confidence
    confidence = None if precision == "logits" else getattr(torch, precision)

    def step() -> None:
        denoise_step(model, row.clone(), row.shape[1], 1, confidence)

    try:
        expected_ms = min(gpu_timing.event_ms(step) for _ in range(2))
        count = num_steps(expected_ms, options.steps, options.seconds)
        return statistics.median(gpu_timing.event_ms(step) for _ in range(count))
    except torch.OutOfMemoryError:
        in_process.free_memory()
        return None


def touched_experts(model: PlainModel, row: torch.Tensor, steps: int) -> float:
    """Count the experts of a layer that any row of [1, T] uses, as the mean over layers and steps.

    Committed tokens are more diverse than masks, so each step uses other experts. If there is not
    enough memory for logits, only the first step is counted.
    """
    row = row.clone()
    num_masked = int((row == model.shape.mask_id).sum())
    with counted_experts(model) as counts:
        try:
            for num_commits in commit_quotas(num_masked, min(steps, num_masked)):
                denoise_step(model, row, row.shape[1], num_commits)
        except torch.OutOfMemoryError:
            in_process.free_memory()
    return statistics.mean(counts)


def masked_row(shape: Shape, case: Case) -> torch.Tensor:
    """Return [1, T] int64: a random prompt and the canvas."""
    prompt = in_process.random_prompt(case.length - case.canvas, shape.vocab_size, seed=0)
    return torch.tensor([[*prompt, *[shape.mask_id] * case.canvas]])


def num_steps(expected_ms: float, most: int, seconds: float) -> int:
    """Return how many steps fit into `seconds`, at least MIN_STEPS and at most `most`."""
    return max(MIN_STEPS, min(most, int(1000 * seconds / expected_ms)))


def floor_ms(
    shape: Shape, case: Case, references: dict[int, Reference], ceilings: dict[str, Any]
) -> float | None:
    """Compute the floor of a case from the rates of this card; None without a CUDA device."""
    if not torch.cuda.is_available():
        return None
    reference = references.get(case.length)
    # Other requests have other tokens, so together they use all experts.
    touched = reference.touched_experts if reference and case.num_requests == 1 else None
    work = forward_work(
        shape, case.length, case.num_requests, head_rows=case.canvas, touched_experts=touched
    )
    rates = gpu_timing.rates(case.length, shape.num_heads, shape.head_dim, ceilings)
    return work.floor_ms(*rates)


def measure_steps(run: Callable[[int], list[Step]], options: argparse.Namespace) -> list[Step]:
    """Measure the steps of a case; `run` is run_case with all arguments except the number of steps.

    The warm-up commits another number of tokens per step. So the costs of every new number of
    masked rows are measured, as in a server.
    """
    expected_ms = min(step.step_ms for step in run(MIN_STEPS))
    return run(num_steps(expected_ms, options.steps, options.seconds))


def run_case(llm: Any, runner: Any, shape: Shape, case: Case, steps: int) -> list[Step]:
    """Run one canvas of every request in `steps` steps; return the steps that had all requests.

    Raises:
        BenchmarkError: the engine did not run the requests together.
    """
    length = case.length - case.canvas
    prompts = in_process.random_prompts(case.num_requests, length, shape.vocab_size)
    parameters = {"algorithm": "semi_ar", "steps": min(steps, case.canvas)}
    parameters |= {"gen_length": case.canvas, "block_length": case.canvas}
    logged = in_process.timed_steps(llm, runner, prompts, parameters)
    steps_of_case = [step for step in logged if step.num_requests == case.num_requests]
    if len(steps_of_case) < MIN_STEPS:
        raise BenchmarkError(
            f"wanted {MIN_STEPS} steps with all {case.num_requests} requests of {case.length} "
            f"rows, got {len(steps_of_case)}"
        )
    return steps_of_case


def row_of(
    family: str,
    case: Case,
    steps: Sequence[Step],
    floor: float | None,
    references: dict[int, Reference],
) -> Row:
    """Return the row of one case."""
    timing = gpu_timing.Timing.of([step.step_ms for step in steps])
    device = [step.device_ms for step in steps if step.device_ms is not None]
    reference = references.get(case.length, Reference(None, None))
    one_ms = reference.step_ms
    return Row(
        family=family,
        length=case.length,
        num_requests=case.num_requests,
        num_steps=timing.num_measured,
        step_ms=timing.median_ms,
        step_min_ms=timing.min_ms,
        device_ms=statistics.median(device) if device else None,
        interval_ms=in_process.median_interval_ms(steps),
        floor_ms=floor,
        reference_ms=None if one_ms is None else one_ms * case.num_requests,
        touched_experts=reference.touched_experts,
        planned_ms=statistics.median(step.planned_ms for step in steps),
    )


def window_row(
    family: str,
    case: Windows,
    steps: Sequence[Step],
    floor: float | None,
    touched: float | None,
) -> Row:
    """Return the row of one case of a block-causal family."""
    plain = row_of(family, Case(case.block_length, case.num_requests), steps, floor, {})
    return replace(plain, touched_experts=touched, context=case.context)


# --- output ----------------------------------------------------------------------------------


def served_line(timed: windows.Round, floor: float | None) -> str:
    """Format the additional line for a case that a server processes in shares."""
    over = harness.formatted(floor and timed.round_ms / floor, ">.2f")
    device = harness.formatted(timed.device_ms, ">.2f")
    served = f"in shares, as served: {timed.round_ms:.2f} ms a forward of all"
    return f"    {served}, device {device}, {over} x floor"


def print_kernels(
    options: argparse.Namespace, table: Table, run: Callable[[int], list[Step]], steps: int
) -> None:
    """With --profile, print where the time of a step is spent on the device."""
    if options.profile:
        for line in kernel_lines(in_process.kernel_times(partial(run, steps))):
            table.note(line)


def kernel_lines(kernels: dict[str, tuple[float, float]], most: int = 15) -> list[str]:
    """Format the longest kernels with milliseconds and launches per step, after their sum."""
    busy = sum(time_ms for time_ms, _ in kernels.values())
    return [f"    device busy {busy:.3f} ms of a step"] + [
        f"    {time_ms:>9.3f} ms {launches:>6.1f} x  {name[:100]}"
        for name, (time_ms, launches) in list(kernels.items())[:most]
    ]


def paint(rows: Sequence[Row], *axes: Any) -> None:
    """Draw time against length, both logarithmic, with one panel per family."""
    families = dict.fromkeys(row.family for row in rows)
    for axis, family in zip(axes, families, strict=True):
        own = [row for row in rows if row.family == family]
        for number, count in enumerate(dict.fromkeys(row.num_requests for row in own)):
            some = [row for row in own if row.num_requests == count]
            _line(axis, some, "step_ms", f"{count} at once", color=f"C{number}", marker="o")
            _line(axis, some, "reference_ms", "reference", color=f"C{number}", linestyle=":")
            _line(axis, some, "floor_ms", "floor", color=f"C{number}", linestyle="--", alpha=0.6)
        axis.set_title(family)
        harness.binary(axis, "rows of a request")
        axis.set_yscale("log")
    axes[0].set_ylabel("step, ms")
    axes[0].legend(fontsize="x-small")


def _line(axis: Any, rows: Sequence[Row], name: str, label: str, **style: Any) -> None:
    points = [(row.length, getattr(row, name)) for row in rows if getattr(row, name) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), label=label, **style)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quality and speed of the decoding algorithms, on the tiny trained models.

    benchmarks/quality_speed.py [--models llada-tiny dream-tiny llada-moe-tiny]
        [--algorithms semi_ar threshold] [--guesses 7] [--temperature 0] [--limit N]
        [--output-dir results/quality_speed]

Every algorithm of `vllm.diffusion.request.algorithms` answers the facts that a model was trained
on: with its defaults, with other values of its parameters (one changed at a time), and with each
cache. A combination that the engine refuses is listed as refused. All questions of a combination
are decoded together by an engine inside this process, with seed 0. Models that are missing under
models/ are trained first.

With --guesses, up to this number of states may be drafted per forward (`num_speculative_states`),
and eight questions are decoded at a time. Answers stay the same, there are fewer forwards, and
`steps per forward` reports how many steps of the algorithm each forward served.

The models have high confidence in the taught questions and answer most of them in one forward,
whatever the algorithm. So each question is also asked after words that no model was taught; then
the order of committing matters.

Written: quality_speed.csv, .json, .md (tables) and .png (accuracy against tokens per forward).

    accuracy              share of answers that are exactly right
    forwards per answer   denoising steps until the answer was final (mean)
    tokens per forward    canvas tokens committed, over all forwards
    steps per forward     steps of the algorithm, over all forwards; 1 without drafts
    seconds               wall time of all answers
"""

from __future__ import annotations

import csv
import os
import sys
import time
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
# More threads than a tiny matrix can use would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from tqdm import tqdm

from benchmarks import harness
from benchmarks.harness import WORDINGS, BenchmarkError, checkpoint, positive, read_facts, worded
from vllm.diffusion.request.algorithms import ALGORITHMS, CACHES
from vllm.diffusion.request.fields import BY_NAME, FIELDS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

GUESSING = 8  # questions that are decoded together if states are drafted
DEFAULT_MODELS = ("llada-tiny", "dream-tiny", "llada-moe-tiny")

# Values of parameters that set the pace. An algorithm that uses none of them is paced by
# its number of steps.
PACE: dict[str, tuple[float, ...]] = {
    "threshold": (0.3, 0.5, 0.7, 0.9, 0.95),
    "factor": (0.5, 1.0, 2.0),
    "relaxed_threshold": (0.5, 0.75),
    "low_threshold": (0.2, 0.4),
    "block_add_threshold": (0.1, 0.5),
}
STEPS_PER_TOKEN = (1.0, 0.5, 0.25, 0.125)
# Parameters that are left out: attention_dtype is in quantisation_quality.py, and all canvases here
# have a given length
OTHERS = ("attention_dtype", "canvas")
COLUMNS = ("model", "questions", "algorithm", "parameters", "cache", "accuracy")
COLUMNS += ("forwards per answer", "tokens per forward", "steps per forward", "seconds")
MARKS = "osD^vP"  # markers of caches in the plot


T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """Way to decode: parameters of a request in addition to the canvas."""

    algorithm: str
    cache: str = "none"
    parameters: dict[str, Any] = field(default_factory=dict)

    def request(self, gen_length: int, block_length: int) -> dict[str, Any]:
        """Return the parameters as a request has them."""
        request: dict[str, Any] = {
            "algorithm": self.algorithm,
            "gen_length": gen_length,
            **self.parameters,
        }
        users = BY_NAME["block_length"].algorithms
        if not users or self.algorithm in users:
            request["block_length"] = block_length
        if self.cache != "none":
            request["cache"] = self.cache
        return request

    def label(self) -> str:
        """Describe the parameters that are not defaults."""
        return " ".join(f"{name}={value}" for name, value in self.parameters.items()) or "defaults"


@dataclass(frozen=True)
class Asked:
    """A case on a model."""

    model: str
    wording: str
    algorithm: str
    cache: str
    parameters: str


@dataclass(frozen=True)
class Row(Asked):
    """Result of one case on one model; `failed` answers count as wrong."""

    questions: int
    right: int
    failed: int
    accuracy: float
    forwards_per_answer: float
    tokens_per_forward: float
    seconds: float
    steps_per_forward: float = 1.0


@dataclass(frozen=True)
class Refused(Asked):
    """Case that the engine refuses on a model."""

    reason: str


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    plan = cases(options.algorithms, options.caches, options.gen_length, options.block_length)
    rows, refused = measure_all(options, plan)
    if not rows:
        raise BenchmarkError(f"no case was run{': ' + refused[0].reason if refused else ''}")
    text = markdown(rows, refused)
    print(text)
    harness.write("quality_speed", options, rows, refused=list(map(asdict, refused)))
    file = options.output_dir / "quality_speed.md"
    file.write_text(text, "utf-8")
    with file.with_suffix(".csv").open("w", newline="", encoding="utf-8") as table:
        writer = csv.DictWriter(table, [column.name for column in fields(Row)])
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    models, wordings = (
        in_order(getattr(row, name) for row in rows) for name in ("model", "wording")
    )
    size = (4 * len(models) + 2, 3.5 * len(wordings) + 0.5)
    shape, shared = (len(wordings), len(models), size), {"sharex": True, "sharey": "row"}
    panels = list(product(wordings, models))
    harness.draw(file.with_suffix(".png"), partial(paint, rows, panels), *shape, **shared)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("quality_speed", __doc__)
    help_text = "names under models/, or checkpoint directories with a facts.jsonl"
    parser.option("--models", DEFAULT_MODELS, help_text)
    parser.option("--algorithms", list(ALGORITHMS), choices=ALGORITHMS)
    parser.option("--caches", list(CACHES), choices=CACHES)
    parser.option("--wordings", list(WORDINGS), choices=WORDINGS)
    parser.option("--limit", None, "questions per model (default: all)", type=positive)
    parser.option("--gen-length", 32, "canvas length in tokens", type=positive)
    parser.option("--block-length", 8, "tokens of one block", type=positive)
    parser.option("--dtype", "float32", "precision of the model")
    parser.option("--guesses", 0, "states that may be drafted per forward")
    parser.option("--temperature", 0.0)
    parser.set_defaults(seed=0)
    return parser.parse_args(arguments)


# --- which cases -----------------------------------------------------------------------------


def cases(
    algorithms: Sequence[str], caches: Sequence[str], gen_length: int, block_length: int
) -> list[Case]:
    """Return all algorithms at several paces without a cache, and at the default with each cache.

    Raises:
        BenchmarkError: the canvas is not a multiple of the block length.
    """
    if gen_length % block_length:
        raise BenchmarkError(
            f"--block-length: given {block_length}; wanted a divisor of --gen-length {gen_length}"
        )
    plan = []
    for algorithm in algorithms:
        if "none" in caches:
            settings = paces(algorithm, gen_length, gen_length // block_length)
            plan += [Case(algorithm, parameters=setting) for setting in settings]
        plan += [Case(algorithm, cache) for cache in caches if cache != "none"]
    return plan


def paces(algorithm: str, gen_length: int, num_blocks: int) -> list[dict[str, Any]]:
    """Return settings of an algorithm: its defaults, or each choice and pace of its parameters."""
    own = [spec for spec in FIELDS if algorithm in spec.algorithms and spec.name not in OTHERS]
    paced = [{spec.name: value} for spec in own for value in PACE.get(spec.name, ())]
    if paced:
        return [{}, *paced]
    steps = {max(num_blocks, round(gen_length * share)) for share in STEPS_PER_TOKEN}
    choices: list[dict[str, Any]] = [
        {spec.name: choice} for spec in own for choice in spec.choices
    ] or [{}]
    return [
        {**choice, "steps": count} for choice in choices for count in sorted(steps, reverse=True)
    ]


# --- running them ----------------------------------------------------------------------------


def measure_all(
    options: argparse.Namespace, plan: Sequence[Case]
) -> tuple[list[Row], list[Refused]]:
    """Measure every case on every model, with a progress bar.

    Raises:
        BenchmarkError: a model cannot be loaded, or it is missing and cannot be trained.
    """
    folders = [checkpoint(name) for name in options.models]
    measured: list[Row | Refused] = []
    settings = {"dtype": options.dtype, "max_model_len": options.gen_length + 256}
    num_cases = len(folders) * len(options.wordings) * len(plan)
    with tqdm(total=num_cases, unit="case") as progress:
        for folder in folders:
            facts = read_facts(folder, options.limit)
            with in_process.engine(folder, dummy_weights=False, **settings) as (llm, _):
                request = plan[0].request(options.gen_length, options.block_length)
                measure(llm, facts[:1], request, ("warm-up", "", "", "", ""))
                for case, wording in product(plan, options.wordings):
                    progress.set_postfix_str(f"{folder.name} {case.algorithm} {case.label()}")
                    identity = (folder.name, wording, case.algorithm, case.cache, case.label())
                    request = case.request(options.gen_length, options.block_length)
                    request["temperature"] = options.temperature
                    if ALGORITHMS[case.algorithm].speculates and options.guesses:
                        request["num_speculative_states"] = options.guesses
                    measured.append(measure(llm, worded(facts, wording), request, identity))
                    progress.update()
    rows = [row for row in measured if isinstance(row, Row)]
    return rows, [case for case in measured if isinstance(case, Refused)]


def measure(
    llm: Any,
    facts: Sequence[tuple[str, str]],
    request: dict[str, Any],
    identity: tuple[str, str, str, str, str],
) -> Row | Refused:
    """Ask all questions with `request`; `identity` has the first five fields of a Row."""
    from vllm.exceptions import VLLMValidationError

    started = time.perf_counter()
    try:
        outputs = ask(llm, facts, request)
    except VLLMValidationError as error:
        return Refused(*identity, reason=one_line(error))
    seconds = time.perf_counter() - started
    reports = [(output.kv_transfer_params or {}).get("dllm", {}) for output in outputs]
    ran = [report for report in reports if "num_forwards" in report]
    if not ran:
        return Refused(*identity, reason=one_line(reports[0].get("error", "every answer failed")))
    num_forwards = sum(report["num_forwards"] for report in ran)
    right = sum(
        output.outputs[0].text.strip() == answer
        for output, (_, answer) in zip(outputs, facts, strict=True)
    )
    return Row(
        *identity,
        questions=len(facts),
        right=right,
        failed=len(reports) - len(ran),
        accuracy=round(right / len(facts), 4),
        forwards_per_answer=round(num_forwards / len(ran), 2),
        tokens_per_forward=round(sum(report["num_committed"] for report in ran) / num_forwards, 3),
        seconds=round(seconds, 2),
        steps_per_forward=round(
            sum(report.get("num_steps", report["num_forwards"]) for report in ran) / num_forwards, 3
        ),
    )


def ask(llm: Any, facts: Sequence[tuple[str, str]], request: dict[str, Any]) -> list[Any]:
    """Ask all questions in the chat template, a few at a time with drafts; return outputs."""
    from vllm import SamplingParams

    conversations = [[{"role": "user", "content": question}] for question, _ in facts]
    sampling = SamplingParams(temperature=0.0, seed=0, extra_args=request)
    count = GUESSING if "num_speculative_states" in request else len(conversations)
    outputs: list[Any] = []
    for start in range(0, len(conversations), count):
        outputs += llm.chat(conversations[start : start + count], sampling, use_tqdm=False)
    return outputs


def one_line(message: object) -> str:
    """Return a message without line breaks."""
    return " ".join(str(message).split())


# --- output ----------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], refused: Sequence[Refused]) -> str:
    """Format one table of all rows, and the refused cases with their reasons."""
    cells = [
        [
            *(row.model, row.wording, f"`{row.algorithm}`", row.parameters, row.cache),
            *(f"{row.accuracy:.1%}", row.forwards_per_answer, row.tokens_per_forward),
            *(row.steps_per_forward, row.seconds),
        ]
        for row in rows
    ]
    lines = list(harness.markdown(COLUMNS, cells))
    for row in rows:
        if row.failed:
            case = f"{row.model}, {row.wording}, {row.algorithm}, {row.parameters}"
            failures = f"{row.failed} of {row.questions} answers failed: {case}, cache {row.cache}"
            lines += ["", failures]
    # Most refusals apply to all models, so each is printed once.
    reasons = in_order(
        f"- `{case.algorithm}`, {case.parameters}, cache {case.cache}: {case.reason}"
        for case in refused
    )
    lines += ["", "Refused:", "", *reasons] if reasons else []
    return "\n".join(lines) + "\n"


def paint(rows: Sequence[Row], panels: Sequence[tuple[str, str]], *axes: Any) -> None:
    """Draw accuracy against tokens per forward, with a colour per algorithm and a marker per cache.

    Args:
        panels: wording and model of each panel.
    """
    algorithms, caches = (
        in_order(getattr(row, name) for row in rows) for name in ("algorithm", "cache")
    )
    pairs = in_order((row.algorithm, row.cache) for row in rows)
    for (wording, model), axis in zip(panels, axes, strict=True):
        for algorithm, cache in pairs:
            wanted = (model, wording, algorithm, cache)
            group = [r for r in rows if (r.model, r.wording, r.algorithm, r.cache) == wanted]
            points = sorted((r.tokens_per_forward, 100 * r.accuracy) for r in group)
            axis.plot(
                *zip(*points, strict=True) if points else ([], []),
                color=f"C{algorithms.index(algorithm) % 10}",
                marker=MARKS[caches.index(cache) % len(MARKS)],
                linewidth=0.8,
                alpha=0.8,
                label=algorithm if cache == "none" else f"{algorithm}, {cache} cache",
            )
        axis.set_title(f"{model}, {wording} questions", fontsize="medium")
    harness.binary(axes[0], "")
    figure = axes[0].figure
    figure.supxlabel("tokens per forward")
    figure.supylabel("accuracy, %")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")


def in_order(values: Iterable[T]) -> list[T]:
    """Return the distinct values, in the order of their first occurrence."""
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    sys.exit(main())

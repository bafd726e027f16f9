#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quality against speed of the decoding algorithms, on the tiny trained models.

    benchmarks/quality_speed.py [--models llada-tiny dream-tiny llada-moe-tiny]
        [--algorithms semi_ar threshold] [--limit N] [--output-dir results/quality_speed]

Every algorithm of `vllm.diffusion.algorithms` answers the facts that a model was trained on, with
its defaults, with other values of its parameters (one changed at a time), and with each cache. A
combination that the engine refuses is listed as refused. All questions of a combination are
decoded together by an engine inside this process, at temperature 0 and seed 0. Models that are
missing under models/ are trained first.

The models are sure of the taught questions and answer most of them in one forward, whatever the
algorithm. So each is also asked with words before it that no model was taught; then the order of
committing matters.

Written: quality_speed.csv, .json, .md (tables) and .png (accuracy against tokens per forward).

    accuracy              share of answers that are exactly right
    forwards per answer   denoise steps until the answer was final (mean)
    tokens per forward    canvas tokens committed, over all forwards
    seconds               wall time of all answers
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

# An engine of a tiny model starts in under a second here; read when vllm is imported. More threads
# than a tiny matrix can use only wait for each other.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: E402

from vllm.diffusion.algorithms import ALGORITHMS  # noqa: E402
from vllm.diffusion.fields import BY_NAME, CACHES, FIELDS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

DEFAULT_MODELS = ("llada-tiny", "dream-tiny", "llada-moe-tiny")

# How a question is asked: as it was taught, or in words that no model was taught.
WORDINGS = {"taught": "{question}", "reworded": "Please tell me. {question}"}

# Values of parameters that set the pace. An algorithm that uses none of them is paced by its number
# of steps.
PACE: dict[str, tuple[float, ...]] = {
    "threshold": (0.3, 0.5, 0.7, 0.9, 0.95),
    "factor": (0.5, 1.0, 2.0),
    "relaxed_threshold": (0.5, 0.75),
    "low_threshold": (0.2, 0.4),
    "block_add_threshold": (0.1, 0.5),
}
STEPS_PER_TOKEN = (1.0, 0.5, 0.25, 0.125)


T = TypeVar("T")


class BenchmarkError(Exception):
    """The benchmark cannot run; the message is one line for the user."""


@dataclass(frozen=True)
class Case:
    """One way to decode: parameters of a request beside the canvas."""

    algorithm: str
    cache: str = "none"
    parameters: dict[str, Any] = field(default_factory=dict)

    def request(self, gen_length: int, block_length: int) -> dict[str, Any]:
        """The parameters as a request carries them."""
        asked: dict[str, Any] = {
            "algorithm": self.algorithm,
            "gen_length": gen_length,
            **self.parameters,
        }
        users = BY_NAME["block_length"].algorithms
        if not users or self.algorithm in users:
            asked["block_length"] = block_length
        if self.cache != "none":
            asked["cache"] = self.cache
        return asked

    def told(self) -> str:
        """The parameters that are not defaults, in words."""
        return " ".join(f"{name}={value}" for name, value in self.parameters.items()) or "defaults"


@dataclass(frozen=True)
class Row:
    """What one case gave on one model; `failed` answers count as wrong."""

    model: str
    wording: str
    algorithm: str
    cache: str
    parameters: str
    questions: int
    right: int
    failed: int
    accuracy: float
    forwards_per_answer: float
    tokens_per_forward: float
    seconds: float


@dataclass(frozen=True)
class Refused:
    """A case that the engine does not run on a model."""

    model: str
    wording: str
    algorithm: str
    cache: str
    parameters: str
    reason: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse_arguments(arguments)
    try:
        plan = cases(options.algorithms, options.caches, options.gen_length, options.block_length)
        rows, refused = measure_all(options, plan)
        write_results(options.output_dir, rows, refused, settings_of(options))
    except (BenchmarkError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted; nothing was written\n")
        return 1
    print(markdown(rows, refused))
    print(f"written: {options.output_dir}")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Quality and speed of the decoding algorithms.")
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(DEFAULT_MODELS),
        metavar="MODEL",
        help="names under models/, or checkpoint directories with a facts.jsonl",
    )
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--wordings", nargs="+", choices=WORDINGS, default=list(WORDINGS))
    parser.add_argument("--limit", type=positive, help="questions per model (default: all)")
    parser.add_argument("--gen-length", type=positive, default=32, help="canvas length in tokens")
    parser.add_argument("--block-length", type=positive, default=8, help="tokens of one block")
    parser.add_argument("--dtype", default="float32", help="precision of the model")
    parser.add_argument("--output-dir", type=Path, default=ROOT / "results" / "quality_speed")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"given {text}; wanted at least 1")
    return number


# --- which cases -----------------------------------------------------------------------------


def cases(
    algorithms: Sequence[str], caches: Sequence[str], gen_length: int, block_length: int
) -> list[Case]:
    """Every algorithm without a cache at several paces, and at its default pace with every cache.

    Raises:
        BenchmarkError: the canvas is not a whole number of blocks.
    """
    if gen_length % block_length:
        raise BenchmarkError(
            f"--block-length: given {block_length}; wanted a divisor of --gen-length {gen_length}"
        )
    found = []
    for algorithm in algorithms:
        if "none" in caches:
            settings = paces(algorithm, gen_length, gen_length // block_length)
            found += [Case(algorithm, parameters=setting) for setting in settings]
        found += [Case(algorithm, cache) for cache in caches if cache != "none"]
    return found


def paces(algorithm: str, gen_length: int, num_blocks: int) -> list[dict[str, Any]]:
    """Settings of an algorithm: its defaults, then each choice and pace of its own parameters."""
    own = [spec for spec in FIELDS if algorithm in spec.algorithms]
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
    """Every case on every model, with a progress bar.

    Raises:
        BenchmarkError: a model is missing and cannot be made, or cannot be loaded.
    """
    folders = [checkpoint(name) for name in options.models]
    rows: list[Row] = []
    refused: list[Refused] = []
    num_cases = len(folders) * len(options.wordings) * len(plan)
    with tqdm(total=num_cases, unit="case") as progress:
        for folder in folders:
            facts = read_facts(folder, options.limit)
            with engine(folder, options) as llm:
                request = plan[0].request(options.gen_length, options.block_length)
                measure(llm, facts[:1], request, ("warm-up", "", "", "", ""))
                for case, wording in product(plan, options.wordings):
                    progress.set_postfix_str(f"{folder.name} {case.algorithm} {case.told()}")
                    identity = (folder.name, wording, case.algorithm, case.cache, case.told())
                    request = case.request(options.gen_length, options.block_length)
                    found = measure(llm, worded(facts, wording), request, identity)
                    if isinstance(found, Row):
                        rows.append(found)
                    else:
                        refused.append(found)
                    progress.update()
    return rows, refused


def checkpoint(name: str) -> Path:
    """The directory of a model; a tiny model under models/ is trained when it is missing.

    Raises:
        BenchmarkError: there is no such model and it cannot be made.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = ROOT / "models" / name
    if not (folder / "config.json").is_file():
        family = name.removesuffix("-tiny")
        script = ROOT / "scripts" / "make_tiny_model.py"
        if subprocess.run([sys.executable, str(script), "--family", family]).returncode:
            raise BenchmarkError(f"--models: no checkpoint in {folder}")
    if not (folder / "facts.jsonl").is_file():
        raise BenchmarkError(f"--models: {folder} has no facts.jsonl")
    return folder.resolve()


def read_facts(folder: Path, limit: int | None) -> list[tuple[str, str]]:
    """(question, answer) pairs; `limit` of them, spread evenly over the list."""
    lines = (folder / "facts.jsonl").read_text(encoding="utf-8").splitlines()
    facts = [(fact["question"], fact["answer"]) for fact in map(json.loads, lines)]
    if limit is None or limit >= len(facts):
        return facts
    return [facts[i * len(facts) // limit] for i in range(limit)]


def worded(facts: Sequence[tuple[str, str]], wording: str) -> list[tuple[str, str]]:
    """The facts with their questions as `wording` asks them."""
    template = WORDINGS[wording]
    return [(template.format(question=question), answer) for question, answer in facts]


@contextmanager
def engine(folder: Path, options: argparse.Namespace) -> Iterator[Any]:
    """A `vllm.LLM` whose engine lives in this process, and is gone when the block ends.

    Raises:
        BenchmarkError: the model cannot be loaded.
    """
    from vllm import LLM

    try:
        llm = LLM(
            model=str(folder),
            dtype=options.dtype,
            max_model_len=options.gen_length + 256,
            disable_log_stats=True,
        )
    except ValueError as error:
        raise BenchmarkError(f"{folder} cannot be loaded: {one_line(error)}") from error
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def measure(
    llm: Any,
    facts: Sequence[tuple[str, str]],
    request: dict[str, Any],
    identity: tuple[str, str, str, str, str],
) -> Row | Refused:
    """Ask all questions with the parameters `request`; `identity` is model to parameters of Row."""
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
    )


def ask(llm: Any, facts: Sequence[tuple[str, str]], request: dict[str, Any]) -> list[Any]:
    """All questions together, greedily, through the chat template; outputs in their order."""
    from vllm import SamplingParams

    conversations = [[{"role": "user", "content": question}] for question, _ in facts]
    sampling = SamplingParams(temperature=0.0, seed=0, extra_args=request)
    outputs: list[Any] = llm.chat(conversations, sampling, use_tqdm=False)
    return outputs


def one_line(message: object) -> str:
    """A message without line breaks."""
    return " ".join(str(message).split())


# --- writing ---------------------------------------------------------------------------------


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    from importlib.metadata import version

    return {
        "gen_length": options.gen_length,
        "block_length": options.block_length,
        "dtype": options.dtype,
        "temperature": 0.0,
        "seed": 0,
        "vllm": version("vllm"),
        "torch": version("torch"),
        "machine": platform.machine(),
        "num_cpus": os.cpu_count(),
    }


def write_results(
    folder: Path, rows: Sequence[Row], refused: Sequence[Refused], settings: dict[str, Any]
) -> None:
    """Write the tables and the plot into `folder`.

    Raises:
        BenchmarkError: no case was run.
    """
    if not rows:
        reason = f": {refused[0].reason}" if refused else ""
        raise BenchmarkError(f"no case was run{reason}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "quality_speed.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [column.name for column in fields(Row)])
        writer.writeheader()
        writer.writerows(map(asdict, rows))
    content = {
        "settings": settings,
        "rows": list(map(asdict, rows)),
        "refused": list(map(asdict, refused)),
    }
    (folder / "quality_speed.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    (folder / "quality_speed.md").write_text(markdown(rows, refused), "utf-8")
    plot(folder / "quality_speed.png", rows)


def markdown(rows: Sequence[Row], refused: Sequence[Refused]) -> str:
    """One table of all rows, and the refused cases with their reasons."""
    lines = [
        "| model | questions | algorithm | parameters | cache | accuracy | forwards per answer "
        "| tokens per forward | seconds |",
        "|---|---|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.model} | {row.wording} | `{row.algorithm}` | {row.parameters} | {row.cache} "
        f"| {row.accuracy:.1%} | {row.forwards_per_answer:.1f} | {row.tokens_per_forward:.2f} "
        f"| {row.seconds:.1f} |"
        for row in rows
    ]
    lines += [f"\n{r.failed} of {r.questions} answers failed: {told(r)}" for r in rows if r.failed]
    if refused:
        lines += ["", "Refused:", ""]
        lines += [f"- {line}" for line in in_order(map(told_once, refused))]
    return "\n".join(lines) + "\n"


def told(row: Row) -> str:
    """Which case this was, in words."""
    return f"{row.model}, {row.wording}, {row.algorithm}, {row.parameters}, cache {row.cache}"


def told_once(case: Refused) -> str:
    """What was refused and why, without the model: most refusals hold for all."""
    return f"`{case.algorithm}`, {case.parameters}, cache {case.cache}: {case.reason}"


def plot(path: Path, rows: Sequence[Row]) -> None:
    """Accuracy against tokens per forward: a colour an algorithm, a mark a cache.

    A column of panels a model, a row a wording.

    Raises:
        BenchmarkError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise BenchmarkError("matplotlib is missing") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    models, wordings = (
        in_order(getattr(row, name) for row in rows) for name in ("model", "wording")
    )
    styles = line_styles(rows, pyplot.get_cmap("tab10"))
    figure, axes = pyplot.subplots(
        len(wordings),
        len(models),
        figsize=(4 * len(models) + 2, 3.5 * len(wordings) + 0.5),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for (row, wording), (column, model) in product(enumerate(wordings), enumerate(models)):
        axis = axes[row][column]
        for (algorithm, cache), style in styles.items():
            wanted = (model, wording, algorithm, cache)
            found = [r for r in rows if (r.model, r.wording, r.algorithm, r.cache) == wanted]
            found.sort(key=lambda r: r.tokens_per_forward)
            points = [(r.tokens_per_forward, 100 * r.accuracy) for r in found]
            axis.plot(*zip(*points, strict=True) if points else ([], []), **style)
        axis.set_title(f"{model}, {wording} questions", fontsize="medium")
        axis.grid(alpha=0.3)
    axes[0][0].set_xscale("log", base=2)
    axes[0][0].xaxis.set_major_formatter("{x:g}")
    figure.supxlabel("tokens per forward")
    figure.supylabel("accuracy, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def line_styles(
    rows: Sequence[Row], colour: Callable[[int], Any]
) -> dict[tuple[str, str], dict[str, Any]]:
    """(algorithm, cache) -> how its line is drawn."""
    algorithms, caches = (
        in_order(getattr(row, name) for row in rows) for name in ("algorithm", "cache")
    )
    marks = "osD^vP"
    return {
        (algorithm, cache): {
            "color": colour(algorithms.index(algorithm)),
            "marker": marks[caches.index(cache) % len(marks)],
            "linewidth": 0.8,
            "alpha": 0.8,
            "label": algorithm if cache == "none" else f"{algorithm}, {cache} cache",
        }
        for algorithm, cache in in_order((row.algorithm, row.cache) for row in rows)
    }


def in_order(values: Iterable[T]) -> list[T]:
    """The different values, each where it came first."""
    return list(dict.fromkeys(values))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Common parts of benchmarks: options, model, printed table, record, plot, failures.

This module imports neither torch nor vllm, because `prepare` sets variables that these read once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from make_dummy_checkpoint import PRESETS, DummyCheckpointError, configuration, write_checkpoint
from test_api_request import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

ENVIRONMENT = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # the released models state 4,096 and support any length
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "GOMP_SPINCOUNT": "10000",  # the same as in a server; set before torch is imported
}
FAMILIES = tuple(dict.fromkeys(family for family, _ in PRESETS))
# Wordings of a question: as it was taught, or with words that no model was taught.
WORDINGS = {"taught": "{question}", "reworded": "Please tell me. {question}"}
WIDTH = re.compile(r"\d+")  # the width in a format


class BenchmarkError(Exception):
    """The benchmark cannot run; the message is one line for the user."""


def prepare(**more: str) -> None:
    """Set the engines' environment variables, unless the user has set them."""
    for name, value in {**ENVIRONMENT, **more}.items():
        os.environ.setdefault(name, value)


def command(main: Callable[..., int | None]) -> Callable[..., int]:
    """Wrap `main` as a command: exit status 1 and one line on stderr if it cannot run."""

    @wraps(main)
    def run(*arguments: Any) -> int:
        try:
            return main(*arguments) or 0
        except (BenchmarkError, DummyCheckpointError, RequestError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
        except KeyboardInterrupt:
            sys.stderr.write("error: interrupted\n")
        return 1

    return run


# --- options ---------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Parser of the options of a benchmark whose results go to a folder.

    Args:
        name: name of the folder below `results`; empty: no folder.
        about: docstring of the benchmark.
    """

    def __init__(self, name: str, about: str | None) -> None:
        kind = argparse.RawDescriptionHelpFormatter
        super().__init__(description=about, formatter_class=kind)
        if name:
            self.option("--output-dir", ROOT / "results" / name, "folder for the results")

    def option(self, name: str, default: Any = None, about: str = "", **more: Any) -> None:
        """Add an option with the type of its default: a number, a text, a path, a list, a switch.

        Args:
            more: arguments of `add_argument`; without a default they include its `type`.
        """
        if default is False:
            more["action"] = "store_true"
        elif isinstance(default, (list, tuple)):
            more = {"nargs": "+", "type": type(default[0]) if default else str, **more}
        elif default is not None:
            more = {"type": type(default), **more}
        shows_default = default is not None and default is not False and default != ()
        default_text = " (default: %(default)s)" if shows_default else ""
        self.add_argument(name, default=default, help=f"{about}{default_text}".strip(), **more)

    def shape(
        self, family: str | None, families: Sequence[str] = FAMILIES, *, takes_model: bool = False
    ) -> None:
        """Add the options for a released model's shape with random weights.

        Args:
            family: default family; None: the option is required.
            takes_model: whether a checkpoint with weights may be given instead.
        """
        either = self.add_mutually_exclusive_group(required=family is None)
        either.add_argument("--family", choices=families, default=family)
        if takes_model:
            either.add_argument("--model", type=Path, help="checkpoint folder with weights")
        self.option("--size", None, "which released model of the family (default: its first)")
        self.scale()

    def scale(self) -> None:
        """Add the options that scale a released shape."""
        self.option("--dtype", "bfloat16")
        self.option("--num-layers", None, "number of layers (default: as released)", type=int)
        self.option("--shrink", 1, "divisor of all widths (for a test run)")


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"given {text}; wanted at least 1")
    return number


# --- the model -------------------------------------------------------------------------------


def configuration_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return config.json for the shape that the options of `Parser.shape` select."""
    sizes = {"num_layers": options.num_layers, "shrink": options.shrink}
    return configuration(options.family, options.size, **sizes)


@contextmanager
def checkpoint_of(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of --model, or a folder with the shape's files without weights."""
    if getattr(options, "model", None) is not None:
        yield options.model.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"num_layers": options.num_layers, "shrink": options.shrink}
        write_checkpoint(Path(folder), options.family, options.size, **sizes)
        yield Path(folder)


# --- questions of the tiny models ------------------------------------------------------------


def checkpoint(name: str) -> Path:
    """Return the directory of a model; a tiny model under models/ is trained if it is missing.

    Raises:
        BenchmarkError: there is no such model and it cannot be trained.
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
    """Read (question, answer) pairs; with `limit`, that many pairs, spread over the list."""
    lines = (folder / "facts.jsonl").read_text(encoding="utf-8").splitlines()
    facts = [(fact["question"], fact["answer"]) for fact in map(json.loads, lines)]
    if limit is None or limit >= len(facts):
        return facts
    return [facts[i * len(facts) // limit] for i in range(limit)]


def worded(facts: Sequence[tuple[str, str]], wording: str) -> list[tuple[str, str]]:
    """Return the facts with their questions in the wording named `wording`."""
    template = WORDINGS[wording]
    return [(template.format(question=question), answer) for question, answer in facts]


# --- requests --------------------------------------------------------------------------------


def sampling_of(parameters: dict[str, Any]) -> Any:
    """Return SamplingParams of a request for a whole canvas, at temperature 0, without drafts.

    Args:
        parameters: parameters of the request, including `gen_length`; they may enable drafts.
    """
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=parameters["gen_length"],
        ignore_eos=True,
        detokenize=False,
        extra_args={"num_speculative_states": 0, **parameters},
    )


def report_of(output: Any) -> dict[str, Any]:
    """Return the engine's report on a request.

    Raises:
        BenchmarkError: The request failed.
    """
    report: dict[str, Any] = (output.kv_transfer_params or {}).get("dllm", {})
    if "error" in report:
        raise BenchmarkError(f"request {output.request_id} failed: {report['error']}")
    return report


def steps_per_forward(reports: Sequence[Mapping[str, Any]]) -> float:
    """Return the number of steps per forward, over all reports."""
    return sum(r["num_steps"] for r in reports) / sum(r["num_forwards"] for r in reports)


# --- output ----------------------------------------------------------------------------------


class Table:
    """Table that prints each row as soon as it is added, above a bar with the time left.

    Args:
        columns: heading -> format of its cells, which also gives the column's width.
        attributes: names of a row's attributes, one per column; without any, rows are sequences of
            cells.
        total: number of rows, if known. Without it, or if stderr is not a terminal, there is no
            bar.
    """

    def __init__(
        self, columns: Mapping[str, str], attributes: str = "", total: int | None = None
    ) -> None:
        self.columns, self._attributes = columns, attributes.split()
        self.rows: list[Any] = []
        self._bar = tqdm(total=total, unit="row", leave=False, disable=not total or None)
        self.note(" ".join(f"{name:{spec[0]}{width_of(spec)}}" for name, spec in columns.items()))

    def add(self, row: Any) -> None:
        """Print one more row, and keep it."""
        self.rows.append(row)
        self._bar.update()
        self.note(self.line(row))
        if self._bar.n == self._bar.total:
            self._bar.close()

    def cells(self, row: Any) -> list[str]:
        """Format a row, cell by cell."""
        values = [getattr(row, name) for name in self._attributes] or row
        return list(map(formatted, values, self.columns.values()))

    def line(self, row: Any) -> str:
        """Format a row as a line."""
        return " ".join(self.cells(row)).rstrip()

    def note(self, text: str) -> None:
        """Print a line between the rows."""
        self._bar.write(text)
        sys.stdout.flush()


def ratio(a: float | None, b: float | None) -> float | None:
    """Divide a by b; None without one of them."""
    return a / b if a is not None and b else None


def width_of(spec: str) -> int:
    """Return the width of cells with a format, such as 9 of ">9.2f"."""
    match = WIDTH.search(spec)
    assert match is not None
    return int(match[0])


def formatted(value: object, spec: str) -> str:
    """Format a cell: a dash for None, yes and no for bool."""
    if value is None or isinstance(value, bool):
        value = {None: "-", True: "yes", False: "no"}[value]
        spec = f"{spec[0]}{width_of(spec)}"
    return f"{value:{spec}}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yield the lines of a Markdown table; columns of numbers are aligned right.

    Raises:
        ValueError: a row is not as long as the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"rows: wanted {len(header)} cells, got {len(row)}: {row!r}")
    is_number = [
        all(isinstance(row[i], (int, float)) or row[i] is None for row in rows)
        for i in range(len(header))
    ]
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join("---:" if number else "---" for number in is_number) + "|"
    for row in rows:
        yield "| " + " | ".join(map(cell, row)) + " |"


def cell(value: object) -> str:
    """Format a value: floats with three digits, at most two decimals; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


# --- writing ---------------------------------------------------------------------------------


def write(kind: str, options: argparse.Namespace, rows: Iterable[Any] = (), **content: Any) -> None:
    """Write KIND.json, with the options and the results, to the folder of the results."""
    from benchmarks.gpu_timing import write_record

    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    if "model" in settings:
        settings["model"] = options.model.name if options.model else options.family
    content["rows"] = [asdict(row) if is_dataclass(row) else row for row in rows]
    write_record(
        options.output_dir / f"{kind}.json", {"kind": kind, "settings": settings} | content
    )
    print(f"written: {options.output_dir}")


def draw(
    path: Path,
    paint: Callable[..., None],
    rows: int = 1,
    columns: int = 1,
    size: tuple[float, float] = (5.0, 4.0),
    **shared: Any,
) -> None:
    """Draw a picture of panels; without matplotlib do nothing.

    Args:
        paint: called with all panels, row by row.
        size: size of the whole picture, in inches.
        shared: arguments of `pyplot.subplots`.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.stderr.write("no plot: matplotlib is missing\n")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # keep text as text
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, **shared)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    paint(*axes.flat)
    figure.tight_layout()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=120, bbox_inches="tight", metadata=metadata)
    pyplot.close(figure)


def binary(axis: Any, label: str) -> None:
    """Make an axis logarithmic, with powers of two."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_xlabel(label)

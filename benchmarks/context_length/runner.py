# SPDX-License-Identifier: Apache-2.0
"""The longest request that runs, and the cost of its steps: the command behind the entry points.

    benchmarks/llada/run_benchmark.py --model-path CHECKPOINT --start 8192 --step 8192 --max 204800
    benchmarks/dream/run_benchmark.py ...
    benchmarks/llada_moe/run_benchmark.py ...

For each length a new server is started with the family's script, sent one request, and stopped. The
prompt has round(alpha x length) random tokens; the remaining tokens are generated as one block, at
temperature 0. Lengths go from --start to --max by --step. After a failure, the limit is searched
between the failure and the last success, down to --precision.

After each length, context_length.json and .csv are written to --output-dir with every length, and
with the reasons of failures. At the end context_length.png shows time and memory against length.
logs/ holds the output of each server. The same command continues an interrupted run.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from benchmarks import harness
from benchmarks.context_length import records
from benchmarks.context_length.measure import Request, Server, measure, ordinary_ids
from benchmarks.context_length.records import ATTRIBUTES, COLUMNS, Results
from benchmarks.harness import BenchmarkError, Table
from benchmarks.run_record import first_line, software_record
from benchmarks.server_process import free_port, is_free

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from benchmarks.context_length.records import Point


ROOT = Path(__file__).resolve().parents[2]
NAMES = {"llada": "LLaDA", "dream": "Dream", "llada-moe": "LLaDA-MoE"}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal that ends the run in order.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@harness.command
def main(family: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command for a family; return the exit status."""
    options = parse_arguments(family, arguments)
    try:
        with interrupting(SIGNALS):
            run(family, options)
    except Interrupted as error:
        sys.stderr.write(f"error: interrupted; the same command goes on in {options.output_dir}\n")
        return 128 + error.number
    return 0


@contextmanager
def interrupting(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Raise `Interrupted` within the block at these signals, unless nohup ignores them."""

    def interrupt(number: int, _frame: object) -> None:
        # Do not use sys.stderr: the signal may have arrived in the middle of one of its writes.
        os.write(2, b"\ninterrupted: ending the server; interrupt again to kill it\n")
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, before[number])


def parse_arguments(family: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    about = f"The longest {NAMES[family]} request, and what its steps cost.\n\n{__doc__}"
    parser = harness.Parser("", about)
    seconds = {"metavar": "SECONDS"}
    help_text = "repository whose scripts start the server"
    parser.option("--project-path", ROOT, help_text, type=absolute)
    parser.option("--model-path", None, "checkpoint folder", type=absolute, required=True)
    results = ROOT / "results" / records.NAME / family
    help_text = "for the results; an interrupted run goes on there"
    parser.option("--output-dir", results, help_text, type=absolute)
    parser.option("--start", 8192, "first length, prompt and canvas, in tokens")
    parser.option("--step", 8192, "from one length to the next")
    parser.option("--max", 204800, "last length")
    parser.option("--precision", 1024, "how exactly the limit is searched, in tokens")
    parser.option("--steps", 1, "denoising steps of a request")
    parser.option("--alpha", 0.5, "share of the prompt in a length")
    parser.option("--gpu", None, "CUDA_VISIBLE_DEVICES of the server (default: as it is set)")
    parser.option("--port", None, "port of the server (default: a free one)", type=int)
    parser.option("--startup-timeout", 1800.0, "for a server to become healthy", **seconds)
    parser.option("--request-timeout", 64800.0, "for an answer", **seconds)
    parser.option("--shutdown-timeout", 300.0, "for a server to end, else it is killed", **seconds)
    parser.option("--gpu-memory-utilization", 0.92, "share of the GPU's memory")
    help_text = "budget of activations (default: the server's)"
    parser.option("--activation-pool-size-bytes", None, help_text, type=int)
    help_text = "longest length of the server (default: that of --max)"
    parser.option("--max-model-len", None, help_text, type=int)
    parser.option("--load-format", None, "of the weights; dummy for a checkpoint without any")
    options = parser.parse_args(arguments)
    if min(options.start - 1, options.step, options.precision, options.steps) < 1:
        parser.error("wanted --start from 2, and --step, --precision and --steps from 1")
    if options.max < options.start:
        parser.error(f"--max: wanted at least --start, {options.start}, got {options.max}")
    if not 0 < options.alpha < 1:
        parser.error(f"--alpha: wanted a share between 0 and 1, got {options.alpha:g}")
    if options.max_model_len is None:
        options.max_model_len = options.max
    return options


def absolute(text: str) -> Path:
    """Convert to an absolute path, so that it does not depend on the current folder."""
    return Path(text).expanduser().absolute()


def run(family: str, options: argparse.Namespace) -> None:
    """Measure all lengths, with one line per length, then print the table and draw the plot.

    Raises:
        BenchmarkError: an argument does not lead to a server, a server does not start, or the first
            length fails.
        SettingsDiffer: the folder belongs to other settings.
    """
    script = options.project_path / "scripts" / f"run_{family.replace('-', '_')}_server.sh"
    if not script.is_file():
        raise BenchmarkError(f"--project-path: wanted a repository with {script.name}, no {script}")
    try:
        prompt_ids = ordinary_ids(options.model_path)
    except (OSError, ValueError, KeyError) as error:
        raise BenchmarkError(f"--model-path: no config.json with vocab_size: {error!r}") from None
    record = run_record(options.gpu)
    results = Results(options.output_dir, settings_of(family, options), record)
    if results.commit_before not in (None, record["commit"]):
        print(f"note: the lengths so far were measured at commit {results.commit_before}")
    sweep = Sweep(family, script, options, results, prompt_ids)
    try:
        length_range = sweep.run()
    finally:
        sweep.print_results()
    if length_range.longest is None:
        raise BenchmarkError(f"the first length, {options.start} tokens, already fails")


def settings_of(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the measurements; a folder with others is not continued."""
    names = (
        *("start", "step", "max", "precision", "steps", "alpha", "gpu", "gpu_memory_utilization"),
        *("activation_pool_size_bytes", "max_model_len", "load_format", "request_timeout"),
    )
    return {
        "family": family,
        "model_path": str(options.model_path),
        **{name: getattr(options, name) for name in names},
        "extra_vllm_args": os.environ.get("EXTRA_VLLM_ARGS", ""),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("VLLM_", "DLLM_")) and "KEY" not in name and "TOKEN" not in name
        },
    }


def run_record(gpu: str | None) -> dict[str, Any]:
    """Record machine, software and command line; this process itself does not use the GPU."""
    select = [] if gpu is None else ["-i", gpu]
    query = "--query-gpu=name,memory.total,driver_version"
    line = first_line("nvidia-smi", *select, query, "--format=csv,noheader,nounits")
    record = software_record()
    parts = [part.strip() for part in (line or "").split(",")]
    if len(parts) == 3 and parts[1].isdigit():
        record["gpu"], record["driver"] = parts[0], parts[2]
        record["gpu_memory_gib"] = round(int(parts[1]) / 1024, 1)
    return record


@dataclass(frozen=True)
class Range:
    """Lengths of a search, in tokens.

    Attributes:
        start, step, maximum: linear part; `maximum` is included if a step reaches it exactly.
        precision: the bisection ends when success and failure are no further apart.
    """

    start: int
    step: int
    maximum: int
    precision: int

    @property
    def lengths(self) -> range:
        """Lengths of the linear part."""
        return range(self.start, self.maximum + 1, self.step)


@dataclass(frozen=True)
class LengthRange:
    """Longest length that runs and shortest length known to fail; None if there is none."""

    longest: int | None
    failure: int | None


def search(tried: Range, runs: Callable[[int, int], bool]) -> LengthRange:
    """Find the longest length that runs, assuming that all shorter lengths run too.

    There is no bisection without a failure, or without a success.

    Args:
        tried: the lengths.
        runs: returns whether a length runs; its second argument is the number of lengths that may
            remain in this part of the search, including this one.
    """
    longest = failure = None
    for index, length in enumerate(tried.lengths):
        if not runs(length, len(tried.lengths) - index):
            failure = length
            break
        longest = length
    if longest is None or failure is None:
        return LengthRange(longest, failure)
    while failure - longest > tried.precision:
        left = math.ceil(math.log2((failure - longest) / tried.precision))
        middle = (longest + failure) // 2
        if runs(middle, left):
            longest = middle
        else:
            failure = middle
    return LengthRange(longest, failure)


@dataclass
class Sweep:
    """Lengths of one run, measured and reported.

    Attributes:
        family, script: model family, and the script that serves the family.
        options: options of the command line.
        results: store of the points.
        prompt_ids: ids from which prompts are drawn.
    """

    family: str
    script: Path
    options: argparse.Namespace
    results: Results
    prompt_ids: Sequence[int]

    def run(self) -> LengthRange:
        """Measure the lengths that are not yet in the results."""
        options = self.options
        tried = Range(options.start, options.step, options.max, options.precision)
        server = self._server()
        print(f"server of each length: {command_line(server)}")
        print(
            f"lengths: {options.start} to {options.max} by {options.step}; if one fails, its limit "
            f"to {options.precision} tokens\n"
        )
        table = Table(COLUMNS, ATTRIBUTES)
        with tqdm(total=len(tried.lengths), unit="length", leave=False) as progress:
            return search(tried, lambda *length: self._runs(*length, progress, table))

    def _runs(self, length: int, left: int, progress: tqdm, table: Table) -> bool:
        """Whether a length runs; see `search`."""
        progress.total = progress.n + left
        point, remark = self.results.final(length), " (measured before)"
        if point is None:
            point, remark = self._measure(length, progress), ""
            self.results.add(point)
        table.note(table.line(point) + remark)
        progress.update()
        if not point.is_final:
            raise BenchmarkError(f"{point.reason}; all of it is in {self._log(length)}")
        return point.runs

    def _measure(self, length: int, progress: tqdm) -> Point:
        options = self.options

        def report_progress(doing: str) -> None:
            progress.set_postfix_str(f"{length}: {doing}")

        request = Request(
            self.family, length, options.alpha, options.steps, options.request_timeout
        )
        tick = progress.refresh if sys.stderr.isatty() else _nothing
        return measure(
            self._server(), request, self.prompt_ids, self._log(length), report_progress, tick
        )

    def _log(self, length: int) -> Path:
        log: Path = self.options.output_dir / "logs" / f"server_{length}.log"
        return log

    def _server(self) -> Server:
        """Return the family's script with its variables.

        Raises:
            BenchmarkError: another process listens on the port.
        """
        options = self.options
        port = free_port() if options.port is None else options.port
        if not is_free(port):
            raise BenchmarkError(f"--port: {port} is in use; wanted a free one")
        variables = {
            "MOSAIC_HOME": str(options.project_path),
            "MODEL_DIR": str(options.model_path),
            "HOST": "127.0.0.1",
            "PORT": str(port),
            "MAX_MODEL_LEN": str(options.max_model_len),
            "GPU_MEMORY_UTILIZATION": str(options.gpu_memory_utilization),
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_LOG_DIFFUSION_STEPS": "1",
            "VLLM_LOGGING_LEVEL": "INFO",  # the level of the log lines with the times of steps
            "VLLM_API_KEY": "",
        }
        if options.gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = options.gpu
        if options.activation_pool_size_bytes is not None:
            variables["VLLM_ACTIVATION_POOL_SIZE_BYTES"] = str(options.activation_pool_size_bytes)
        load_format = [] if options.load_format is None else ["--load-format", options.load_format]
        return Server(
            command=["bash", str(self.script), *load_format],
            variables=variables,
            port=port,
            startup_s=options.startup_timeout,
            shutdown_s=options.shutdown_timeout,
            gpu=options.gpu,
        )

    def print_results(self) -> None:
        """Print the table of all lengths and the limit found, and draw the plot."""
        points = self.results.points()
        if not points:
            return
        print()
        table = Table(COLUMNS, ATTRIBUTES)
        for point in points:
            table.add(point)
        longest = max((point.length for point in points if point.runs), default=None)
        failure = next((point for point in points if not point.runs and point.is_final), None)
        print(f"\nlongest length that runs: {longest or 'none'}")
        if failure is not None:
            print(f"shortest that fails: {failure.length} ({failure.status}: {failure.reason})")
        title = f"{self.options.model_path.name}, {self.options.steps} steps"
        look = partial(records.paint, points, title)
        harness.draw(self.results.path("png"), look, columns=2, size=(11, 4.5))
        print(f"written: {self.options.output_dir}", flush=True)


def command_line(server: Server) -> str:
    """Format the start of a server as a shell command."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in server.variables.items()]
    return " ".join([*variables, shlex.join(server.command)])


def _nothing() -> None:
    """Do nothing: without a terminal the bar is drawn only at changes."""

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the benchmarks behind a part of docs/measurements, one after the other.

    benchmarks/reproduce.py --list
    benchmarks/reproduce.py floors guesses [--minutes 20] [--output-dir results/reproduce]

No weights are needed, except the tiny models in models/, which are trained if a part requires them.
Each run has a folder in the output directory with its record and its output. If one run fails, the
others still run. With --minutes, a run that exceeds the limit is stopped and later runs are not
started. One line per run reports its status; the exit status is 0 if all were good.

Written: a folder for each run; tables.md.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness
from benchmarks.harness import ROOT, BenchmarkError, Table
from benchmarks.performance_tables import TableError, section
from benchmarks.server_process import GUARD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SETTING = re.compile(r"[A-Z][A-Z0-9_]*=")  # setting of the environment, in front of a command
COLUMNS = {"part": "<12", "run": "<4", "seconds": ">8.1f", "status": "<9", "command": "<1"}
GUARD_S = 10  # seconds for a run to end by itself
STEP = "step_latency.py --no-reference --seconds 0.5"
GUESSES = "speculation.py --gen-length 96 --rounds 1"
PARTS = {
    "floors": (
        f"{STEP} --families llada --requests 1 --lengths 32 256 4096 --quantization fp8 int4",
        f"{STEP} --families llada-moe --requests 1 --lengths 32 256 1024",
        f"{STEP} --families llada2 --requests 1 64 128",
        f"{STEP} --families sdar --requests 128 --block-lengths 4 32",
        "commit_fusion.py --requests 1 16 128",
    ),
    "guesses": (
        f"{GUESSES} --states 4 8 --forced 0.4 1 --clients 1 8 16 64 --chances 0 0.7 1",
        f"{GUESSES} --states 4 8 --clients 1 --chances 0 1 --quantization fp8",
        f"{GUESSES} --states 4 --clients 1 --chances 0 1 --family sdar --block-length 4",
        "same_answers.py --prompts 100",
        "same_answers.py --models llada-tiny dream-tiny llada2-tiny",
    ),
    "rollouts": (
        "rollouts.py --family llada --quantization fp8",
        "rollouts.py --family sdar --block-length 4",
    ),
    "families": (
        *(
            f"{STEP} --families {family} --requests 1 64 128"
            for family in ("llada2", "llada22", "llada2", "nemotron")
        ),
        "self_speculation.py --accepted 8",
    ),
    "portable": tuple(
        f"{setting}{STEP} --families llada --requests 1 --lengths 32 64 256 --quantization fp8 int4"
        for setting in ("", "VLLM_DLLM_KERNELS=8.9 ", "")
    )
    + tuple(
        f"{setting}{STEP} --families llada-moe --requests 1 --lengths 32 256"
        for setting in ("", "VLLM_DLLM_KERNELS=8.0 ")
    ),
    "attention": (
        "parallel.py --ways one --lengths --clients --quantization fp8 --attention-dtype model fp8",
    ),
    "two-gpus": (
        "parallel.py",
        "parallel.py --ways one sp2 --lengths 32 --clients --long 204800 --quantization fp8"
        " --attention-dtype model fp8",
        "rollouts.py --family llada --backend nccl --rounds 1",
    ),
    "four-gpus": (
        "parallel.py --ways one tp4 dp4 --long",
        "parallel.py --ways one sp4 --lengths 32 --clients --long 204800 524288",
        "VLLM_ACTIVATION_POOL_SIZE_BYTES=8589934592 parallel.py --ways sp4 --lengths 32 --clients"
        " --long 1048576",
        "parallel.py --ways tp4 --family llada2 --size flash --lengths 32 --long --clients",
    ),
}


@harness.command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = harness.Parser("reproduce", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.option("--list", False, "print the commands only")
    parser.option("--minutes", None, "for all runs together (default: no limit)", type=float)
    options = parser.parse_args(arguments)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown or not (options.parts or options.list):
        given = unknown[0] if unknown else "none"
        raise BenchmarkError(f"PART: given {given}; wanted {', '.join(PARTS)}")
    runs = [(part, line) for part in options.parts or PARTS for line in PARTS[part]]
    if options.list:
        print("\n".join(f"{part:<12} {line}" for part, line in runs))
        return 0
    ends = time.monotonic() + 60 * (options.minutes or float("inf"))
    table = Table(COLUMNS, total=len(runs))
    folders = []
    for number, (part, line) in enumerate(runs, 1):
        folders.append(options.output_dir / f"{number:02}-{part}")
        started = time.monotonic()
        status = run(line, folders[-1], ends - started)
        table.add((part, str(number), time.monotonic() - started, status, line))
    written = options.output_dir / "tables.md"
    written.write_text("\n".join(tables(folders)) + "\n", encoding="utf-8")
    print(f"written: {written}")
    return int(any(row[3] != "good" for row in table.rows))


def run(line: str, folder: Path, seconds: float) -> str:
    """Run a command of a part; return its status."""
    if seconds <= 0:
        return "no time"
    words = shlex.split(line)
    settings = dict(word.split("=", 1) for word in words if SETTING.match(word))
    script, *options = words[len(settings) :]
    folder.mkdir(parents=True, exist_ok=True)
    guard = [sys.executable, str(GUARD), str(GUARD_S)]
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [*guard, *command, "--output-dir", str(folder)],
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,  # the run ends when this pipe is closed
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(seconds if seconds < float("inf") else None)
        except subprocess.TimeoutExpired:
            return "no time"
        finally:
            process.communicate()
    return "good" if code == 0 else f"failed {code}"


def tables(folders: Sequence[Path]) -> Iterator[str]:
    """Yield the lines of all results: tables for known records, else the printed output."""
    for folder in folders:
        records = sorted(folder.glob("*.json"))
        try:
            lines = [line for record in records for line in section(record)]
        except TableError:
            lines = []
        output = folder / "output.txt"
        yield from (f"## {folder.name}", "", *lines)
        if not lines and output.is_file():
            yield from ("```", output.read_text(encoding="utf-8").rstrip(), "```", "")


if __name__ == "__main__":
    sys.exit(main())

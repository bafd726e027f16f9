#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""GPU memory of an engine over many requests of random lengths, by allocator.

    python benchmarks/fragmentation.py --output-dir results/fragmentation

The same requests run one after the other in three engines at the same time, each in a separate
process: with the activation pool on CUDA virtual memory, on PyTorch's caching allocator, and on
that allocator with expandable segments. The model has two layers of the LLaDA-8B shape, which is
enough because every layer has the same buffers. CUDA graphs are off, because they take the same
memory in each engine. The logarithm of the lengths is uniform, so short lengths are as likely as
long ones.

* used: the largest number of bytes that buffers and temporaries of a step used at a time.
* reserved: the largest GPU memory that the process held for them, read after every request.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from benchmarks import harness
from benchmarks.harness import BenchmarkError, Table, positive

if TYPE_CHECKING:
    from collections.abc import Sequence

ALLOCATORS = {
    "virtual memory": {"VLLM_USE_VMM": "1"},
    "PyTorch": {"VLLM_USE_VMM": "0"},
    "PyTorch, expandable segments": {
        "VLLM_USE_VMM": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    },
}
COLUMNS = {"allocator": "<28", "used, GiB": ">9.3f", "reserved, GiB": ">13.3f"}
COLUMNS |= {"reserved / used": ">15.3f"}
GIB = 1 << 30


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    if options.allocator:
        print(json.dumps(measure(options)))
        return
    running = {name: start(name, variables, options) for name, variables in ALLOCATORS.items()}
    table, failed = Table(COLUMNS), []
    for allocator, process in running.items():
        output, _ = process.communicate()
        if process.returncode:
            failed.append(f"{allocator}: its process ended with {process.returncode}")
        else:
            table.add(row_of(allocator, json.loads(output.splitlines()[-1])))
    if failed:
        raise BenchmarkError("; ".join(failed))
    write_results(options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("fragmentation", __doc__)
    parser.option("--requests", 200, "how many", type=positive)
    parser.option("--shortest", 128, "in tokens", metavar="T")
    parser.option("--longest", 65_536, "in tokens", metavar="T")
    parser.option("--seed", 0, "seed of the lengths")
    parser.shape("llada")
    parser.set_defaults(num_layers=2)
    parser.add_argument("--allocator", choices=ALLOCATORS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 2 <= options.shortest <= options.longest:
        parser.error("wanted --shortest from 2, and --longest no less")
    return options


def start(
    allocator: str, variables: dict[str, str], options: argparse.Namespace
) -> subprocess.Popen[str]:
    """Start a process with these variables that prints the result of `measure`."""
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(options).items()
        if value is not None
    ]
    return subprocess.Popen(
        [sys.executable, __file__, *words, "--allocator", allocator],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run the requests in an engine of this process; the environment selects its allocator."""
    import torch

    from benchmarks import in_process  # Import this first: it sets variables that vllm reads once.
    from benchmarks.shapes import Shape

    if not torch.cuda.is_available():
        raise BenchmarkError("wanted a CUDA device, found none")
    vocab_size = Shape.of(harness.configuration_of(options)).vocab_size
    draw = random.Random(options.seed)
    ends = math.log(options.shortest), math.log(options.longest)
    lengths = [round(math.exp(draw.uniform(*ends))) for _ in range(options.requests)]
    with in_process.engine_of(options, max_model_len=options.longest, enforce_eager=True) as (
        llm,
        runner,
    ):
        reserved = Reserved(runner.pool)
        used = most = 0
        shows_progress = options.allocator == next(iter(ALLOCATORS))
        for length in tqdm(lengths, unit="request", leave=False, disable=not shows_progress):
            canvas = length // 2
            prompt = in_process.random_prompt(length - canvas, vocab_size, seed=length)
            parameters = {"gen_length": canvas, "block_length": canvas, "steps": 1}
            in_process.run_requests(llm, [prompt], {"algorithm": "semi_ar", **parameters})
            used = max(used, runner.pool.peak_bytes)
            most = max(most, reserved.num_bytes())
    return {"used": used, "reserved": most}


class Reserved:
    """Memory that this process has taken from the GPU since this object was created.

    Args:
        pool: the engine's activation pool.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._before = self._outside_the_pool()

    def num_bytes(self) -> int:
        """Return the bytes of the pool, plus those that PyTorch's allocator holds outside of it."""
        taken: int = self._pool.num_bytes + self._outside_the_pool() - self._before
        return taken

    def _outside_the_pool(self) -> int:
        import torch

        # PyTorch also counts the memory that it holds of a pool on virtual memory.
        shared: int = self._pool.used_bytes
        return torch.cuda.memory_reserved() - shared


def row_of(allocator: str, measured: dict[str, float]) -> list[str | float]:
    """Return a row's cells in the order of COLUMNS."""
    used, reserved = measured["used"] / GIB, measured["reserved"] / GIB
    return [allocator, used, reserved, reserved / used]


def write_results(options: argparse.Namespace, rows: list[list[str | float]]) -> None:
    """Write the table as JSON, for benchmarks/performance_tables.py."""
    lengths = f"{options.requests} requests of {options.shortest} to {options.longest} tokens"
    title = f"{lengths}, {options.num_layers} layers of LLaDA-8B"
    harness.write("memory_fragmentation", options, rows, title=title, columns=list(COLUMNS))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What an engine takes of the GPU's memory over many requests of random lengths, by allocator.

    python benchmarks/fragmentation.py --output-dir results/fragmentation

Runs the same requests, one after the other, in three engines side by side, each in a process of its
own: with the activation pool on CUDA virtual memory, on PyTorch's caching allocator, and on that
allocator with expandable segments. Two layers of the LLaDA-8B shape do: every layer lays out the
same buffers. CUDA graphs are off, as they take the same memory in each. Short lengths are as likely
as long ones: their logarithm is uniform.

* used: the most that buffers and temporaries of any step had in use at a time.
* reserved: the most that the process held of the GPU for them, looked at after every request.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from tqdm import tqdm  # noqa: E402

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
COLUMNS = ["allocator", "used, GiB", "reserved, GiB", "reserved / used"]
GIB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse_arguments(arguments)
    if options.allocator:
        print(json.dumps(measure(options)))
        return 0
    running = {name: start(name, variables, options) for name, variables in ALLOCATORS.items()}
    rows = []
    print(" | ".join(COLUMNS))
    for allocator, process in running.items():
        told, _ = process.communicate()
        if process.returncode:
            sys.stderr.write(f"error: {allocator}: its process ended with {process.returncode}\n")
            continue
        rows.append(row_of(allocator, json.loads(told.splitlines()[-1])))
        print(" | ".join(f"{c:.3f}" if isinstance(c, float) else c for c in rows[-1]), flush=True)
    if len(rows) < len(ALLOCATORS):
        return 1
    write_results(options, rows)
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description="Memory over requests of random lengths.")
    parser.add_argument("--requests", type=int, default=200, help="how many")
    parser.add_argument("--shortest", type=int, default=128, metavar="T", help="in tokens")
    parser.add_argument("--longest", type=int, default=65_536, metavar="T", help="in tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--output-dir", type=Path, default=ROOT / "results" / "fragmentation")
    parser.add_argument("--allocator", choices=ALLOCATORS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 2 <= options.shortest <= options.longest or options.requests < 1:
        parser.error("wanted --shortest from 2, --longest no less, and --requests from 1")
    return options


def start(
    allocator: str, variables: dict[str, str], options: argparse.Namespace
) -> subprocess.Popen[str]:
    """A process with these variables that prints what `measure` finds."""
    asked = {name: value for name, value in vars(options).items() if name != "allocator"}
    words = [
        word
        for name, value in asked.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return subprocess.Popen(
        [sys.executable, __file__, *words, "--allocator", allocator],
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Run the requests in an engine of this process, whose allocator the environment chooses."""
    import torch
    from make_dummy_checkpoint import configuration, write_checkpoint

    from benchmarks import in_process  # first: it sets what vllm reads once
    from benchmarks.shapes import Shape

    if not torch.cuda.is_available():
        sys.exit("error: wanted a CUDA device, found none")
    vocab_size = Shape.of(configuration("llada")).vocab_size
    draw = random.Random(options.seed)
    ends = math.log(options.shortest), math.log(options.longest)
    lengths = [round(math.exp(draw.uniform(*ends))) for _ in range(options.requests)]
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), "llada", num_layers=options.num_layers)
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": options.longest,
            "enforce_eager": True,
        }
        with in_process.engine(Path(folder), dummy_weights=True, **settings) as (llm, runner):
            reserved = Reserved(runner.pool)
            used = most = 0
            shows_progress = options.allocator == next(iter(ALLOCATORS))
            for length in tqdm(lengths, unit="request", leave=False, disable=not shows_progress):
                canvas = length // 2
                prompt = in_process.random_prompt(length - canvas, vocab_size, seed=length)
                in_process.run_requests(
                    llm,
                    [prompt],
                    {
                        "algorithm": "semi_ar",
                        "gen_length": canvas,
                        "block_length": canvas,
                        "steps": 1,
                    },
                )
                used = max(used, runner.pool.peak_bytes)
                most = max(most, reserved.num_bytes())
    return {"used": used, "reserved": most}


class Reserved:
    """Memory that this process has taken of the GPU since this object was made.

    Args:
        pool: the engine's activation pool.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._before = self._beside_the_pool()

    def num_bytes(self) -> int:
        """Of the pool, and of PyTorch's allocator beside it."""
        taken: int = self._pool.num_bytes + self._beside_the_pool() - self._before
        return taken

    def _beside_the_pool(self) -> int:
        import torch

        # What PyTorch has of a pool on virtual memory it counts as its own, too.
        shared: int = self._pool.used_bytes
        return torch.cuda.memory_reserved() - shared


def row_of(allocator: str, found: dict[str, float]) -> list[str | float]:
    """Cells as COLUMNS has them."""
    used, reserved = found["used"] / GIB, found["reserved"] / GIB
    return [allocator, used, reserved, reserved / used]


def write_results(options: argparse.Namespace, rows: list[list[str | float]]) -> None:
    """The table as JSON, for benchmarks/performance_tables.py."""
    from benchmarks.gpu_timing import run_record

    options.output_dir.mkdir(parents=True, exist_ok=True)
    path = options.output_dir / "memory_fragmentation.json"
    content = {
        "run": run_record(),
        "title": f"{options.requests} requests of {options.shortest} to {options.longest} tokens, "
        f"{options.num_layers} layers of LLaDA-8B",
        "columns": COLUMNS,
        "rows": rows,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())

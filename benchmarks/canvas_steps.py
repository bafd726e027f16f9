#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of denoising steps of DiffusionGemma, whose canvases begin as noise.

    benchmarks/canvas_steps.py [--clients 1 8 32] [--context 1024] [--canvases 2] [--steps 16]
        [--quantization fp8] [--gpu-memory-utilization 0.4] [--output-dir results/canvas_steps]

The model has the released shape and random weights. Each request has --context random tokens of
prompt and --canvases canvases, and no canvas ends before its last step. Only steps count whose rows
all belong to canvases: steps that read a prompt or a finished canvas are left out.

    rows      rows of such a step; fewer than all canvases have if the requests take turns
    step      median time from the engine's first instruction of a step to its results on the host
    device    median time between CUDA events around the same steps
    interval  median time from the start of a step to the start of the next
    tokens/s  tokens of a finished canvas over --steps intervals, of all canvases of a step
    GiB       memory of the GPU that is in use after the requests, by all processes

Written: canvas_steps.json.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

import torch

from benchmarks import harness
from benchmarks.harness import Table, positive

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from benchmarks.in_process import Step

COLUMNS = {"clients": ">7", "rows": ">6", "steps": ">5", "step ms": ">8.2f", "device ms": ">9.2f"}
COLUMNS |= {"interval": ">8.2f", "tokens/s": ">9.1f", "GiB": ">6.1f"}


@dataclass(frozen=True)
class Row:
    """Result for one number of clients; times are milliseconds."""

    clients: int
    rows: int
    num_steps: int
    step_ms: float
    device_ms: float | None
    interval_ms: float
    tokens_per_s: float
    used_gib: float | None


def measured(options: argparse.Namespace, llm: Any, runner: Any, clients: int) -> Row:
    """Run the requests once as a warm-up and once more, and return the second run's times."""
    config = runner.model.config
    prompts = in_process.random_prompts(clients, options.context, config.vocab_size)
    length = config.block_length
    parameters = {
        "gen_length": options.canvases * length,
        "steps_per_block": options.steps,
        "confidence_threshold": 0.0,
        "temperature": 1.0,
        "seed": 1,
    }
    for _ in range(2):
        steps = in_process.timed_steps(llm, runner, prompts, parameters)
    by_rows: dict[int, list[Step]] = defaultdict(list)
    intervals: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if step.num_rows == step.num_sampled:
            by_rows[step.num_rows].append(step)
    for step, following in pairwise(steps):
        if step.num_rows == step.num_sampled == following.num_sampled:
            intervals[step.num_rows].append(1000 * (following.started - step.started))
    if not intervals:
        raise harness.BenchmarkError("no step consists of canvases alone; give more --steps")
    rows = max(intervals, key=lambda size: len(intervals[size]))
    some, interval = by_rows[rows], statistics.median(intervals[rows])
    device = [step.device_ms for step in some if step.device_ms is not None]
    return Row(
        clients,
        rows,
        len(some),
        statistics.median(step.step_ms for step in some),
        statistics.median(device) if device else None,
        interval,
        1000 * rows / (options.steps * interval),
        used_gib(),
    )


def used_gib() -> float | None:
    """Return the memory of the GPU that is in use, GiB; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return float(total - free) / 2**30


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    attributes = "clients rows num_steps step_ms device_ms interval_ms tokens_per_s used_gib"
    table = Table(COLUMNS, attributes, len(options.clients))
    settings: dict[str, Any] = {
        "max_model_len": options.context + (options.canvases + 1) * 256,
        "max_num_seqs": max(options.clients),
        # Long steps are not cut, so that all steps are timed.
        "additional_config": {"dllm": {"longest_pause_ms": 0}},
    }
    for name in ("quantization", "gpu_memory_utilization"):
        if (value := getattr(options, name)) is not None:
            settings[name] = value
    with in_process.engine_of(options, **settings) as (llm, runner):
        for clients in options.clients:
            table.add(measured(options, llm, runner, clients))
    harness.write("canvas_steps", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("canvas_steps", __doc__)
    parser.shape("diffusion-gemma", ["diffusion-gemma"])
    parser.option("--clients", [1, 8, 32], "requests at once", type=positive)
    parser.option("--context", 1024, "tokens of every prompt", type=positive)
    parser.option("--canvases", 2, "canvases of every answer", type=positive)
    parser.option("--steps", 16, "denoising steps of a canvas", type=positive)
    parser.option("--gpu-memory-utilization", None, "share of memory for the engine", type=float)
    parser.option("--quantization", None, "quantisation of the weights, such as fp8")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of a denoising step with LoRA adapters, compared with an engine without --enable-lora.

    benchmarks/lora.py [--family llada] [--rows 32 256 1024 4096] [--ranks 16 64 128]
        [--modules all attention] [--max-lora-rank 128] [--quantization fp8] [--mixed]
        [--tensor-parallel-size 2] [--output-dir results/lora]

The model has a released shape and random weights, and so have the adapters. A request has one block
of 32 masked positions after a random prompt (16 if it has 32 rows), and no cache. Both engines are
in this process and take turns: a round of the engine without adapters, of the engine with adapters
for a request without one, and for a request with one.

    without, none, adapter   median device time of a step (on a CPU, of the host)
    none x, adapter x        over the time without
    limit                    the largest ratio that LLaDA-8B in bf16 should have

With --mixed, 9 requests of 32 rows share each step: 8 with an adapter each, and one without.

Written: lora.json.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import in_process  # isort: skip  (before torch and vllm)

from vllm.lora.request import LoRARequest

from benchmarks import harness
from benchmarks.harness import Table, positive
from benchmarks.random_weights import write_adapter
from benchmarks.step_latency import kernel_lines
from vllm.diffusion.adapters.matrices import Matrices

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from benchmarks.in_process import Step

BLOCK = 32
NUM_ADAPTERS = 8  # with --mixed
MIXED_ROWS = 32  # rows of a request
WARM_UP_STEPS = 3
COLUMNS = {"modules": ">9", "rank": ">4", "N": ">2", "rows": ">5", "without": ">9.3f"}
COLUMNS |= {"none": ">9.3f", "adapter": ">9.3f", "none x": ">7.3f", "adapter x": ">9.3f"}
COLUMNS |= {"limit": ">5.2f"}
ATTRIBUTES = "modules rank num_requests rows without_ms none_ms adapter_ms none_x adapter_x limit"
# Largest ratio by modules and rank, for these numbers of rows of a single request.
LIMIT_ROWS = (32, 256, 1024, 4096)
LIMITS = {
    ("all", 16): (1.15, 1.12, 1.10, 1.08),
    ("all", 64): (1.20, 1.15, 1.14, 1.12),
    ("all", 128): (1.30, 1.22, 1.20, 1.18),
    ("attention", 16): (1.09, 1.07, 1.06, 1.05),
}
MIXED_LIMIT = 1.18
# Room for the steps of both engines
POOL_BYTES = 12 << 30


@dataclass(frozen=True)
class Row:
    """Result of one case; times in milliseconds of a step."""

    modules: str
    rank: int
    num_requests: int
    rows: int
    without_ms: float
    none_ms: float
    adapter_ms: float
    limit: float | None

    @property
    def none_x(self) -> float:
        """Ratio of a step without an adapter to the engine without adapters."""
        return self.none_ms / self.without_ms

    @property
    def adapter_x(self) -> float:
        """Ratio of a step with adapters to the engine without adapters."""
        return self.adapter_ms / self.without_ms


@harness.command
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse_arguments(arguments)
    os.environ.setdefault("VLLM_ACTIVATION_POOL_SIZE_BYTES", str(POOL_BYTES))
    table = Table(COLUMNS, ATTRIBUTES)
    with ExitStack() as stack:
        settings = settings_of(options)
        without = stack.enter_context(in_process.engine_of(options, **settings))
        for modules in options.modules:
            # Without slots for the other matrices, their products stay as they are.
            targets = attention_names(options) if modules == "attention" else None
            with in_process.engine_of(
                options,
                enable_lora=True,
                max_loras=NUM_ADAPTERS if options.mixed else 1,
                max_lora_rank=options.max_lora_rank or max(options.ranks),
                lora_target_modules=targets,
                **settings,
            ) as adapting:
                for rank in options.ranks:
                    with loaded(options, (modules, rank), adapting[0]) as adapters:
                        measure(options, (modules, rank), (without, adapting), adapters, table)
    harness.write("lora", options, table.rows)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.Parser("lora", __doc__)
    parser.shape("llada")
    parser.option("--rows", LIMIT_ROWS, "rows of a request", type=positive)
    parser.option("--ranks", [16, 64, 128], type=positive)
    parser.option("--max-lora-rank", None, "default: the largest rank", type=positive)
    parser.option("--modules", ["all", "attention"], choices=("all", "attention"))
    parser.option("--mixed", False, f"{NUM_ADAPTERS} adapters in each step, not one")
    parser.option("--quantization", None, type=str)
    parser.option("--tensor-parallel-size", 1, "ranks that divide the weights", type=positive)
    parser.option("--steps", 16, "steps of a round", type=positive)
    parser.option("--rounds", 3, type=positive)
    parser.option("--profile", False, "print the longest kernels of steps with adapters, too")
    options = parser.parse_args(arguments)
    if options.profile and options.tensor_parallel_size > 1:
        parser.error("--profile: given with several ranks; wanted one")
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that both engines share."""
    longest = max(options.rows)
    return {
        "quantization": options.quantization,
        "tensor_parallel_size": options.tensor_parallel_size,
        "max_model_len": max(longest, 2 * MIXED_ROWS),
        "max_num_seqs": NUM_ADAPTERS + 1,
        "max_num_batched_tokens": max(longest, (NUM_ADAPTERS + 1) * MIXED_ROWS),
        # Steps must not be divided.
        "additional_config": {"dllm": {"longest_pause_ms": 0}},
    }


def config_of(options: argparse.Namespace) -> Any:
    """Return the configuration of the model."""
    from vllm.diffusion.models.config import DiffusionConfig

    return DiffusionConfig.from_dict(harness.configuration_of(options))


def attention_names(options: argparse.Namespace) -> list[str]:
    """Return the last parts of the names of attention's matrices."""
    matrices = Matrices(config_of(options)).all.items()
    own = [name.rpartition(".")[2] for name, matrix in matrices if "self_attn" in matrix.product]
    return list(dict.fromkeys(own))


def measure(
    options: argparse.Namespace,
    kind: tuple[str, int],
    engines: Iterable[Any],
    adapters: list[LoRARequest | None],
    table: Table,
) -> None:
    """Measure the cases of one kind of adapter, in rounds of both engines."""
    (without, plain_runner), (adapting, runner) = engines
    cases = [(1, rows) for rows in options.rows]
    if options.mixed:
        cases = [(NUM_ADAPTERS + 1, MIXED_ROWS)]
    for count, rows in cases:
        some = [*adapters, None] if options.mixed else adapters
        turns = (
            (without, plain_runner, None),
            (adapting, runner, None),
            (adapting, runner, some),
        )
        times: list[list[float]] = [[], [], []]
        for number in range(options.rounds + 1):
            num_steps = options.steps if number else WARM_UP_STEPS
            for own, turn in zip(times, turns, strict=True):
                measured = steps_of(options, turn, (count, rows), num_steps)
                if number:
                    own += map(time_of, measured)
        medians = map(statistics.median, times)
        table.add(Row(*kind, count, count * rows, *medians, limit_of(options, kind, rows)))
        if options.profile:
            run = partial(steps_of, options, turns[-1], (count, rows), options.steps)
            for line in kernel_lines(in_process.kernel_times(run)):
                table.note(line)


def limit_of(options: argparse.Namespace, kind: tuple[str, int], rows: int) -> float | None:
    """Return the largest ratio that a case should have; None if none is known."""
    is_known = options.family == "llada" and options.quantization is None
    if not is_known:
        return None
    if options.mixed:
        return MIXED_LIMIT if kind == ("all", 16) else None
    limits = LIMITS.get(kind)
    return limits[LIMIT_ROWS.index(rows)] if limits and rows in LIMIT_ROWS else None


def steps_of(
    options: argparse.Namespace,
    turn: tuple[Any, Any, list[LoRARequest | None] | None],
    case: tuple[int, int],
    num_steps: int,
) -> list[Step]:
    """Run one canvas of every request; return the steps that had all requests."""
    (llm, runner, adapters), (count, rows) = turn, case
    canvas = min(BLOCK, rows // 2)
    prompts = in_process.random_prompts(count, rows - canvas, config_of(options).vocab_size)
    parameters = {"algorithm": "semi_ar", "steps": min(num_steps, canvas)}
    parameters |= {"gen_length": canvas, "block_length": canvas}
    logged = in_process.timed_steps(llm, runner, prompts, parameters, adapters)
    steps = [step for step in logged if step.num_requests == count]
    if not steps:
        raise harness.BenchmarkError(f"wanted steps with all {count} requests of {rows} rows")
    return steps


def time_of(step: Step) -> float:
    """Return the milliseconds of a step on the device, or of the host on a CPU."""
    return step.step_ms if step.device_ms is None else step.device_ms


@contextmanager
def loaded(
    options: argparse.Namespace, kind: tuple[str, int], llm: Any
) -> Iterator[list[LoRARequest | None]]:
    """Load random adapters until the block ends; yield how requests name them."""
    modules, rank = kind
    adapters = list[LoRARequest | None]()
    with tempfile.TemporaryDirectory() as parent:
        for number in range(1, 1 + (NUM_ADAPTERS if options.mixed else 1)):
            folder = Path(parent, str(number))
            write_adapter(
                folder,
                harness.configuration_of(options),
                rank,
                options.dtype,
                lambda matrix: modules == "all" or "self_attn" in matrix.product,
            )
            # Every adapter of a run has a number of its own.
            name, adapter_id = f"{modules}-{rank}-{number}", rank * NUM_ADAPTERS + number
            adapter = LoRARequest(name, adapter_id, str(folder))
            llm.llm_engine.add_lora(adapter)
            adapters.append(adapter)
        yield adapters
        for adapter_id in llm.llm_engine.list_loras():
            llm.llm_engine.remove_lora(adapter_id)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Long answers to long prompts with `cache: frozen`: the first step, and all that follow it.

    benchmarks/frozen.py [--family llada] [--prompts 16256 204672] [--canvas 128] [--steps 128]
        [--compare 16384] [--pool-gib G] [--host-gib H] [--output-dir results/frozen]

Released shape, random weights, prompts as token ids, one request at a time through the engine.
Measured is the request as a whole, from the call to its answer, its first step, which computes
prompt and canvas, and the median of the others, from the start of one to the start of the next.
Sequences of up to --compare tokens are run without a cache as well. With a small pool, keys and
values of some layers lie in host memory and are copied in every step.

Written: frozen.json.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from benchmarks import in_process  # noqa: E402  # isort: skip  (before torch and vllm)

from make_dummy_checkpoint import PRESETS  # noqa: E402

from benchmarks import harness  # noqa: E402
from benchmarks.shapes import BLOCK_FAMILIES, Shape  # noqa: E402

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

GIB = 1 << 30
FAMILIES = tuple(dict.fromkeys(f for f, _ in PRESETS if f not in BLOCK_FAMILIES))
WARM_UP_PROMPT = 200


@dataclass(frozen=True)
class Row:
    """One request.

    Attributes:
        total_s: from the call to the answer.
        first_s: until the second step began.
        step_ms: median interval of the steps after it.
        peak_bytes: of the largest step, with what is kept.
        host_layers: whose keys and values lay in host memory.
    """

    prompt: int
    cache: str
    num_steps: int
    total_s: float
    first_s: float
    step_ms: float
    peak_bytes: int
    host_layers: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    options = parse_arguments(arguments)
    print(f"{'prompt':>8} {'cache':>7} {'steps':>6} {'total s':>9} {'first s':>9} {'step ms':>9}")
    rows = measure(options)
    harness.write("frozen", options, rows=[asdict(row) for row in rows])
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = harness.parser_of("frozen", "Long answers to long prompts.", FAMILIES, "llada")
    parser.add_argument("--prompts", nargs="+", type=int, default=[16256, 204672], metavar="T")
    parser.add_argument("--canvas", type=int, default=128)
    parser.add_argument("--steps", type=int, help="default: one for each token of the canvas")
    parser.add_argument("--compare", type=int, default=16384, metavar="T", help="0: nothing")
    parser.add_argument("--pool-gib", type=float, help="activation pool (default: what is free)")
    parser.add_argument("--host-gib", type=float, help="host memory for keys and values")
    options = parser.parse_args(arguments)
    if min(*options.prompts, options.canvas) < 1:
        parser.error("--prompts, --canvas: wanted at least 1")
    options.steps = options.steps or options.canvas
    return options


def measure(options: argparse.Namespace) -> list[Row]:
    """Every prompt, without a cache where it is short enough, and frozen."""
    for name, gib in (
        ("VLLM_ACTIVATION_POOL_SIZE_BYTES", options.pool_gib),
        ("VLLM_HOST_CACHE_SIZE_BYTES", options.host_gib),
    ):
        if gib is not None:
            os.environ[name] = str(int(gib * GIB))
    vocab_size = Shape.of(harness.configuration_of(options)).vocab_size
    cases = [(WARM_UP_PROMPT, "frozen")]
    for prompt in options.prompts:
        is_compared = prompt + options.canvas <= options.compare
        cases += [(prompt, cache) for cache in (["none"] if is_compared else []) + ["frozen"]]
    rows = []
    with (
        harness.checkpoint_of(options) as folder,
        in_process.engine(
            folder,
            dummy_weights=True,
            dtype=options.dtype,
            max_model_len=max(*options.prompts, WARM_UP_PROMPT) + options.canvas,
        ) as (llm, runner),
    ):
        for number, (length, cache) in enumerate(cases):
            prompt = in_process.random_prompt(length, vocab_size, number)
            row = measure_request(llm, runner, prompt, cache, options)
            if number:
                rows.append(row)
                print(
                    f"{length:>8} {cache:>7} {row.num_steps:>6} {row.total_s:>9.2f} "
                    f"{row.first_s:>9.2f} {row.step_ms:>9.2f}  peak {row.peak_bytes / GIB:.2f} "
                    f"GiB, {row.host_layers} layers in host memory",
                    flush=True,
                )
    return rows


def measure_request(
    llm: Any, runner: Any, prompt: Sequence[int], cache: str, options: argparse.Namespace
) -> Row:
    """One request alone."""
    canvas, host_layers = options.canvas, []
    asked = {"gen_length": canvas, "block_length": canvas, "steps": options.steps, "cache": cache}
    start = runner.start

    def noting_start(new: Any) -> None:
        host_layers.append(new.host_layers)
        start(new)

    runner.start = noting_start
    try:
        with in_process.StepLog().attached(runner) as log:
            begun = time.perf_counter()
            (output,) = in_process.run_requests(llm, [prompt], asked)
            total_s = time.perf_counter() - begun
    finally:
        del runner.start
    later = sorted(log.steps(), key=lambda step: step.started)[1:]
    return Row(
        prompt=len(prompt),
        cache=cache,
        num_steps=output.kv_transfer_params["dllm"]["num_forwards"],
        total_s=total_s,
        first_s=later[0].started - begun,
        step_ms=in_process.median_interval_ms(later),
        peak_bytes=output.kv_transfer_params["dllm"]["peak_bytes"],
        host_layers=host_layers[0],
    )


if __name__ == "__main__":
    sys.exit(main())

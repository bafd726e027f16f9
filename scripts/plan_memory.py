#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints how a server would run requests of given lengths: chunks, peak memory and time.

    scripts/plan_memory.py MODEL --tokens 204800 1048576 --pool-gib 8.5
    scripts/plan_memory.py MODEL --tokens 204800 --pool-gib 8.5 --terms

MODEL is a checkpoint's folder or hub name; one made by `scripts/make_dummy_checkpoint.py` will do.
Nothing is loaded and no GPU is needed: plans follow from shapes (docs/memory.md).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.memory import ModelShape, Plan

GIB = 1 << 30


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from vllm.diffusion.core import envs
    from vllm.diffusion.core.errors import ActivationBudgetError
    from vllm.diffusion.engine.worker.pool_budget import planning_budget
    from vllm.diffusion.memory import Planner, StepShape

    shape = shape_of(options.model, options.dtype, options.tensor_parallel_size)
    planner = Planner(
        shape,
        planning_budget(int(options.pool_gib * GIB)),
        row_budget=1,
        uses_host=envs.use_host_residual() and not options.no_host,
        is_split=envs.use_vmm(),
    )
    num_refused = 0
    for tokens in options.tokens:
        read = int(tokens * options.masked_share)
        try:
            step = StepShape(tokens, read, tokens, fp8_attention=options.attention_dtype == "fp8")
            plan = planner.plan(step)
        except ActivationBudgetError as error:
            num_refused += 1
            print(f"T = {tokens}: {error}")
            continue
        print(f"T = {tokens}: {plan}, {plan.predicted_peak_bytes / tokens / 1024:.2f} KiB a token")
        if options.terms:
            print_terms(shape, plan)
    return 1 if num_refused else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print plans of steps, and what they take.")
    parser.add_argument("model", metavar="MODEL", help="a checkpoint: folder or hub name")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="prompt and canvas")
    parser.add_argument("--pool-gib", type=float, required=True, help="activation pool, in GiB")
    parser.add_argument(
        "--masked-share", type=float, default=0.5, help="of the tokens (default 0.5)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the model (default bfloat16)")
    parser.add_argument(
        "--attention-dtype", choices=("model", "fp8"), default="model", help="default: model"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks (default 1)")
    parser.add_argument("--no-host", action="store_true", help="keep all rows on the GPU")
    parser.add_argument("--terms", action="store_true", help="print the bytes of each stage")
    return parser.parse_args(arguments)


def shape_of(model: str, dtype: str, num_ranks: int) -> ModelShape:
    """Return the model's sizes on each of `num_ranks` GPUs."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    from vllm.diffusion.engine.planning import model_shape

    args = EngineArgs(model=model, dtype=dtype, enforce_eager=True, skip_tokenizer_init=True)
    config = args.create_engine_config()
    config.parallel_config.tensor_parallel_size = num_ranks
    return model_shape(config, torch.device("cuda"))


def print_terms(shape: ModelShape, plan: Plan) -> None:
    """Print the bytes of one row of every stage under a plan."""
    from vllm.diffusion.core.buffers import row_bytes
    from vllm.diffusion.memory.footprint import Footprint

    footprint = Footprint(shape)
    layout = plan.layout
    stages = {
        "resident": (footprint.resident(layout),),
        "keys-values": footprint.keys_values(layout),
        "attend": footprint.attend(layout, is_packed=False),
        "feed-forward": footprint.feed_forward(layout),
        "logits": footprint.read(layout, is_packed=False),
    }
    for stage, phases in stages.items():
        for phase in phases:
            listed = ", ".join(f"{buffer.name} {buffer.row_bytes}" for buffer in phase)
            print(f"  {stage}: {row_bytes(phase)} bytes a row: {listed}")


if __name__ == "__main__":
    raise SystemExit(main())

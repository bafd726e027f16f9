#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Print how a server would run requests of given lengths: chunks, peak memory and time.

    scripts/plan_memory.py MODEL --tokens 204800 1048576 --pool-gib 8.5
    scripts/plan_memory.py MODEL --tokens 204800 --pool-gib 8.5 --terms
    scripts/plan_memory.py MODEL --quantization int4 --card-gib 12 --tokens 4096 --requests 8

With --card-gib the pool is the memory that the weights leave free on such a card.

MODEL is a checkpoint's folder or hub name; a checkpoint of `scripts/make_dummy_checkpoint.py` is
enough. Nothing is loaded and no GPU is needed: plans follow from shapes (docs/memory.md).
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
CONTEXT_BYTES = 400 << 20  # bytes of a process on a card before it allocates anything


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    from vllm.diffusion.core import envs
    from vllm.diffusion.core.errors import ActivationBudgetError
    from vllm.diffusion.engine.worker.pool_budget import planning_budget
    from vllm.diffusion.memory import Admission, Demand, Planner

    shape = shape_of(options)
    pool = pool_of(shape, options)
    num_refused = 0
    for tokens in options.tokens:
        demand = Demand(
            length=tokens,
            sample_positions=int(tokens * options.masked_share),
            keeps_cache=options.cache == "dual",
            window=min(options.block_length, tokens) if options.cache == "dual" else None,
            fp8_attention=options.attention_dtype == "fp8",
        )
        planner = Planner(
            shape,
            planning_budget(pool),
            row_budget=demand.shared_rows * options.requests,
            uses_host=envs.use_host_residual() and not options.no_host,
            is_split=envs.use_vmm(),
        )
        admission = Admission(planner)
        together = [demand] * options.requests
        name = f"T = {tokens}" + (f", {options.requests} at once" if options.requests > 1 else "")
        if options.requests > 1 and admission.obstacle(together[1:], demand) is not None:
            num_refused += 1
            print(f"{name}: the requests do not fit at once")
            continue
        try:  # If keys are kept, plan the first forward, which runs alone and has the most rows.
            first = together[:1] if options.cache == "dual" else together
            plan = planner.plan(admission.step_of(first), admission.kept_bytes(together))
        except ActivationBudgetError as error:
            num_refused += 1
            print(f"{name}: {error}")
            continue
        per_token = plan.predicted_peak_bytes / (tokens * options.requests) / 1024
        print(f"{name}: {plan}, {per_token:.2f} KiB a token")
        if options.terms:
            print_terms(shape, plan)
    return 1 if num_refused else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print plans of steps, and their memory and time.")
    parser.add_argument("model", metavar="MODEL", help="a checkpoint: folder or hub name")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="prompt and canvas")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--pool-gib", type=float, help="activation pool, in GiB")
    memory.add_argument("--card-gib", type=float, help="memory of the card, in GiB")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.92,
        help="share of the card (default 0.92)",
    )
    parser.add_argument(
        "--quantization", choices=("fp8", "int4", "nf4"), help="quantization of the weights"
    )
    parser.add_argument("--requests", type=int, default=1, help="requests at once (default 1)")
    parser.add_argument(
        "--cache", choices=("none", "dual"), default="none", help="key-value cache (default none)"
    )
    parser.add_argument(
        "--block-length", type=int, default=32, help="with --cache dual (default 32)"
    )
    parser.add_argument(
        "--masked-share", type=float, default=0.5, help="share of masked tokens (default 0.5)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the model (default bfloat16)")
    parser.add_argument(
        "--attention-dtype", choices=("model", "fp8"), default="model", help="default: model"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks (default 1)")
    parser.add_argument("--no-host", action="store_true", help="keep all rows on the GPU")
    parser.add_argument("--terms", action="store_true", help="print the bytes of each stage")
    return parser.parse_args(arguments)


def shape_of(options: argparse.Namespace) -> ModelShape:
    """Return the model's shape on each of its GPUs."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    from vllm.diffusion.engine.planning import model_shape

    args = EngineArgs(
        model=options.model,
        dtype=options.dtype,
        quantization=options.quantization,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    config = args.create_engine_config()
    config.parallel_config.tensor_parallel_size = options.tensor_parallel_size
    return model_shape(config, torch.device("cuda"))


def pool_of(shape: ModelShape, options: argparse.Namespace) -> int:
    """Return the bytes of the pool: the given size, or the memory that the weights leave free."""
    from vllm.diffusion.engine.worker.pool_budget import OUTSIDE_BYTES

    if options.pool_gib is not None:
        return int(options.pool_gib * GIB)
    taken = weight_bytes(shape) + CONTEXT_BYTES + OUTSIDE_BYTES
    pool = int(options.card_gib * GIB * options.gpu_memory_utilization) - taken
    print(f"weights {weight_bytes(shape) / GIB:.2f} GiB, pool {pool / GIB:.2f} GiB")
    return pool


def weight_bytes(shape: ModelShape) -> int:
    """Return the bytes of one GPU's weights if embedding and head are separate matrices."""
    width, experts = shape.hidden_size, shape.experts
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    inner = shape.mlp_width
    if experts is not None:
        inner = experts.count * experts.width + experts.shared_width
    layers = shape.num_layers * width * (attention + 3 * inner) * shape.weight_bytes
    return int(layers + 2 * shape.num_columns * width * shape.element_bytes)


def print_terms(shape: ModelShape, plan: Plan) -> None:
    """Print the bytes per row of every stage under a plan."""
    from vllm.diffusion.core.stages import row_bytes
    from vllm.diffusion.memory.footprint import Footprint

    footprint = Footprint(shape)
    layout = plan.layout
    stages = {
        "resident": (footprint.resident(layout),),
        "keys-values": footprint.keys_values(layout),
        "attend": footprint.attend(layout, is_packed=False),
        "feed-forward": footprint.feed_forward(layout),
        "logits": footprint.logits(layout, is_packed=False),
    }
    for stage, phases in stages.items():
        for phase in phases:
            listed = ", ".join(f"{buffer.name} {buffer.row_bytes}" for buffer in phase)
            print(f"  {stage}: {row_bytes(phase)} bytes a row: {listed}")


if __name__ == "__main__":
    raise SystemExit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of experts, by default LLaDA-MoE's: routing, grouped products, the feed-forward stage.

    benchmarks/kernels/bench_experts.py [--rows 1 32 256 ...] [--sweep] [--json FILE]
    benchmarks/kernels/bench_experts.py --experts 256 --width 512             LLaDA2.0-mini's

All times are replays of CUDA graphs over the weights of several layers in turn, which do not fit
into a cache.

"torch" is the same stage with `torch._grouped_mm` and gathered copies, as plain PyTorch computes
it. "floor" is the longer of two times: that of the bytes of the experts that the rows use, at the
bandwidth of a copy measured in the same run, and that of the arithmetic, at the rate of a large
matrix product. "route" is the product with the router and the choice. "windows" is the same if
windows of 32 rows choose among 48 experts, as in LLaDA2.2. "fp8" is the two products with fp8
matrices, including the passes that quantise their rows.

With --sweep, all launches of each kernel that could be chosen are timed instead, and printed with
the fastest first. A star marks the tiles that `gather_gemm` chooses, and the launches that
`vllm.diffusion.ops` runs.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_timing import KernelParser, compare, copy_bandwidth, matmul_rate, report
from benchmarks.gpu_timing import random_rows as random
from gather_gemm import route, sum_terms
from gather_gemm.launch import GroupedConfig, choose_gated, choose_product
from gather_gemm.scoring import SOFTMAX, Scoring
from vllm.diffusion.ops import quantise_weight
from vllm.diffusion.ops.experts import DenseExperts, gated_products, route_rows, weighted_terms
from vllm_add_llada.cuda_kernels import fused_ops

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gather_gemm import Routing

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
NUM_LAYERS = 3
NUM_ROUNDS = 4  # rounds over the layers per graph, so that the launch of the graph does not count
EPS = 1e-5
NAMES = ("experts touched", "floor us", "stage us", "of floor", "torch stage us", "gated us")
NAMES += ("weighted us", "route us", "windows us", "sum us", "torch route us")
NAMES += ("fp8 gated us", "fp8 weighted us")
COLUMNS = dict.fromkeys(("rows", *NAMES), ">15.4g")
# Launches to time: columns, depth, warps and stages of a tile. Each is timed with the number of
# rows that is chosen today, and with half of it.
GATED_TILES = (
    *((64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 2), (64, 128, 4, 3)),
    *((128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2)),
)
PRODUCT_TILES = (
    *((128, 64, 4, 3), (128, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 128, 4, 2)),
    *((128, 128, 8, 3), (256, 64, 8, 3), (256, 64, 8, 4)),
)
# Elements of a block of the choice, and its warps.
CHOICES = ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (2048, 16), (4096, 8), (4096, 16))


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, and the rows at several points of the layer."""

    num_chosen: int
    norm: Tensor  # [D]
    gate: Tensor  # [E, D]
    w1: Tensor  # [E, 2I, D]
    w2: Tensor  # [E, D, I]
    quantised: tuple[DenseExperts, DenseExperts]  # w1 and w2 as fp8
    x: Tensor  # [R, D]
    routing: Routing
    inner: Tensor  # [R * k, I]
    terms: Tensor  # [R, k, D]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = KernelParser(__doc__, ROWS)
    parser.option("--hidden", 2048, "D, width of the rows")
    parser.option("--experts", 64, "E, number of experts")
    parser.option("--chosen", 8, "k, experts per row")
    parser.option("--width", 1024, "I, inner width of this rank's experts")
    parser.option("--repeats", 10, "repeats of each measurement")
    parser.option("--sweep", False, "time all launches that could be chosen")
    options = parser.parse(arguments)
    weights = [make_weights(options) for _ in range(NUM_LAYERS)]
    layers = (
        [make_layer(num_rows, options.chosen, *each) for each in weights]
        for num_rows in options.rows
    )
    if options.sweep:
        for each in layers:
            sweep(each, options.repeats)
        return
    sizes = f"{options.experts} x ({options.hidden} -> {options.width})"
    title = f"experts: {sizes}, {options.chosen} chosen, bf16"
    report(options.json, title, COLUMNS, (measure(each, options.repeats) for each in layers))


def make_weights(
    options: argparse.Namespace,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[DenseExperts, DenseExperts]]:
    """Make norm, router, w1 and w2 with the spread of trained weights, and w1 and w2 as fp8."""
    hidden, num_experts, width = options.hidden, options.experts, options.width
    w1 = random(num_experts, 2 * width, hidden, scale=hidden**-0.5)
    w2 = random(num_experts, hidden, width, scale=width**-0.5)
    return (
        torch.rand(hidden, device="cuda").bfloat16(),
        random(num_experts, hidden, scale=hidden**-0.5),
        *(w1, w2),
        (as_fp8(w1), as_fp8(w2)),
    )


def as_fp8(matrices: Tensor) -> DenseExperts:
    """Quantise each row of [E, N, K] with its own scale."""
    values = torch.empty(matrices.shape, dtype=fused_ops.FP8, device=matrices.device)
    scales = torch.empty(matrices.shape[:2], device=matrices.device)
    quantise_weight(matrices.flatten(0, 1), values.flatten(0, 1), scales.flatten())
    return DenseExperts(values, scales)


def make_layer(
    num_rows: int,
    num_chosen: int,
    norm: Tensor,
    gate: Tensor,
    w1: Tensor,
    w2: Tensor,
    quantised: tuple[DenseExperts, DenseExperts],
) -> Layer:
    x = random(num_rows, len(norm))
    normed = fused_ops.rms_norm(x, norm, EPS)
    routing = route_rows(normed, gate, num_chosen)
    inner = gated_products(normed, DenseExperts(w1), routing)
    terms = weighted_terms(inner, DenseExperts(w2), routing)
    return Layer(num_chosen, norm, gate, w1, w2, quantised, x, routing, inner, terms)


def measure(layers: list[Layer], repeats: int) -> list[float]:
    """Measure a row of the table."""

    def time(**variants: Callable[[Layer], object]) -> dict[str, float]:
        return times_us(layers, repeats, variants)

    us = time(stage=stage, torch=torch_stage)
    us |= time(gated=gated, weighted=weighted, sum=summed)
    us |= time(route=routed, windows=routed_in_windows, torch_route=torch_routed)
    us |= time(fp8_gated=gated_fp8, fp8_weighted=weighted_fp8)
    num_touched = sum(count_touched(layer) for layer in layers) / len(layers)
    floor = floor_us(layers[0], num_touched)
    return [
        *(len(layers[0].x), num_touched, floor, us["stage"], us["stage"] / floor, us["torch"]),
        *(us["gated"], us["weighted"], us["route"], us["windows"], us["sum"], us["torch_route"]),
        *(us["fp8_gated"], us["fp8_weighted"]),
    ]


def times_us(
    layers: list[Layer], repeats: int, variants: dict[str, Callable[[Layer], object]]
) -> dict[str, float]:
    """Measure the microseconds of one call of each variant."""
    calls = {
        name: [partial(call, layer) for layer in layers] * NUM_ROUNDS
        for name, call in variants.items()
    }
    times = compare(calls, repeats=repeats)
    return {name: timing.median_us for name, timing in times.items()}


def sweep(layers: list[Layer], repeats: int) -> None:
    """Print the time of every launch of every kernel for this number of rows."""
    for kernel, variants in (
        ("gated", gated_launches(layers[0])),
        ("weighted", weighted_launches(layers[0])),
        ("route", route_launches(layers[0])),
        ("windows", window_launches()),
    ):
        print_sweep(kernel, layers, times_us(layers, repeats, variants))


def gated_launches(first: Layer) -> dict[str, Callable[[Layer], object]]:
    """Return the launches of the product with silu(gate) * up."""
    from gather_gemm import grouped_kernel

    def launch(layer: Layer, config: GroupedConfig) -> None:
        slots, ends = layer.routing.slots, layer.routing.ends
        grouped_kernel.launch_gated(
            layer.x, slots, layer.num_chosen, layer.w1, ends, layer.inner, config
        )

    def compiled(layer: Layer) -> None:
        slots, ends = layer.routing.slots, layer.routing.ends
        fused_ops.gated_gemm(layer.x, slots, layer.num_chosen, layer.w1, ends)

    return grouped_launches(first, launch, compiled, choose_gated, GATED_TILES, 2)


def weighted_launches(first: Layer) -> dict[str, Callable[[Layer], object]]:
    """Return the launches of the weighted product."""
    from gather_gemm import grouped_kernel

    def launch(layer: Layer, config: GroupedConfig) -> None:
        weights, slots, ends = layer.routing
        terms = layer.terms.flatten(0, 1)
        grouped_kernel.launch_weighted(
            layer.inner, layer.w2, ends, slots, weights, terms, early=True, config=config
        )

    def compiled(layer: Layer) -> None:
        weights, slots, ends = layer.routing
        fused_ops.weighted_gemm(layer.inner, layer.w2, ends, slots, weights, early=True)

    return grouped_launches(first, launch, compiled, choose_product, PRODUCT_TILES, 1)


def grouped_launches(
    first: Layer,
    launch: Callable[..., None],
    compiled: Callable[[Layer], None],
    choose: Callable[..., GroupedConfig],
    tiles: Sequence[tuple[int, int, int, int]],
    num_weights: int,
) -> dict[str, Callable[[Layer], object]]:
    """Return the tiles that fit, the chosen one with a star, and the compiled kernel.

    Args:
        num_weights: number of matrices whose tiles a stage holds.
    """
    from gather_gemm import grouped_kernel

    shared_bytes = grouped_kernel._shared_bytes(first.x.device)
    chosen = choose(len(first.inner), len(first.gate), 2, shared_bytes)
    configs = [replace(chosen, ahead=ahead) for ahead in (0, 4, 8)] + [
        GroupedConfig(rows, *tile, ahead=chosen.ahead)
        for rows in sorted({chosen.rows, max(16, chosen.rows // 2)})
        for tile in tiles
    ]
    variants: dict[str, Callable[[Layer], object]] = {
        f"{config}{' *' * (config == chosen)}": partial(launch, config=config)
        for config in configs
        if config.num_stages * config.stage_bytes(2, num_weights) <= shared_bytes
    }
    if fused_ops.has_grouped_gemm(first.x, first.w1):
        variants["compiled"] = compiled
    return variants


def route_launches(first: Layer) -> dict[str, Callable[[Layer], object]]:
    """Return the launches of the product with the router and the choice."""
    from gather_gemm import routing_kernel

    def launch(layer: Layer, block: tuple[int, int]) -> None:
        parts = routing_kernel.launch_score(layer.x, layer.gate)
        weights, slots, ends = layer.routing
        routing_kernel.launch_route(
            parts, layer.num_chosen, None, Scoring(), weights, slots, ends, block
        )

    def compiled(layer: Layer) -> None:
        fused_ops.route_rows(layer.x, layer.gate, layer.num_chosen)

    def plain(layer: Layer) -> None:
        route(layer.x @ layer.gate.t(), layer.num_chosen)

    variants: dict[str, Callable[[Layer], object]] = {
        f"{block[0]} elements a block, {block[1]} warps": partial(launch, block=block)
        for block in CHOICES
    }
    if fused_ops.has_router(first.x, first.gate):
        variants["compiled"] = compiled
    return {**variants, "as chosen *": routed, "PyTorch's product, then the choice": plain}


def window_launches() -> dict[str, Callable[[Layer], object]]:
    """Return the launches of the product with the router and the choice by windows."""
    from gather_gemm import routing_kernel

    def launch(layer: Layer, num_warps: int, in_parts: bool) -> None:
        x, gate = layer.x, layer.gate
        logits = routing_kernel.launch_score(x, gate) if in_parts else x @ gate.t()
        block, scoring = (0, num_warps), windowed(layer)
        routing_kernel.launch_route(
            logits, layer.num_chosen, None, scoring, *layer.routing, block=block
        )

    variants: dict[str, Callable[[Layer], object]] = {
        f"{num_warps} warps{' after parts' * in_parts}": partial(
            launch, num_warps=num_warps, in_parts=in_parts
        )
        for num_warps in (4, 8, 16)
        for in_parts in (False, True)
    }
    return {**variants, "as chosen *": routed_in_windows}


def print_sweep(kernel: str, layers: list[Layer], us: dict[str, float]) -> None:
    for name, time_us in sorted(us.items(), key=lambda item: item[1]):
        print(f"{kernel:>8} of {len(layers[0].x):>5} rows {time_us:>8.2f} us  {name}", flush=True)


def count_touched(layer: Layer) -> int:
    return len(layer.routing.ends.unique()) - int(layer.routing.ends[0] == 0)


def floor_us(layer: Layer, num_touched: float) -> float:
    """Compute the time to read the used experts and the router, or to compute the sums."""
    elements = layer.w1[0].numel() + layer.w2[0].numel()
    num_bytes = 2 * (num_touched * elements + layer.gate.numel())
    flops = 2 * elements * len(layer.inner)
    return 1e6 * max(num_bytes / copy_bandwidth(), flops / matmul_rate())


def gated(layer: Layer) -> Tensor:
    return gated_products(layer.x, DenseExperts(layer.w1), layer.routing)


def weighted(layer: Layer) -> Tensor:
    return weighted_terms(layer.inner, DenseExperts(layer.w2), layer.routing)


def gated_fp8(layer: Layer) -> Tensor:
    return gated_products(layer.x, layer.quantised[0], layer.routing)


def weighted_fp8(layer: Layer) -> Tensor:
    return weighted_terms(layer.inner, layer.quantised[1], layer.routing)


def routed(layer: Layer) -> Routing:
    return route_rows(layer.x, layer.gate, layer.num_chosen)


def windowed(layer: Layer) -> Scoring:
    """Return the rule of `routed` with LLaDA2.2's windows."""
    return SOFTMAX._replace(window=32, capacity=min(48, len(layer.gate)))


def routed_in_windows(layer: Layer) -> Routing:
    return route_rows(layer.x, layer.gate, layer.num_chosen, None, windowed(layer))


def summed(layer: Layer) -> None:
    sum_terms(layer.terms, out=layer.x, adds=True)


def stage(layer: Layer) -> None:
    """Run the feed-forward stage: x += experts(norm(x)).

    The residual is small, so that values stay in range.
    """
    normed = fused_ops.rms_norm(layer.x, layer.norm, EPS)
    routing = route_rows(normed, layer.gate, layer.num_chosen)
    inner = gated_products(normed, DenseExperts(layer.w1), routing)
    sum_terms(weighted_terms(inner, DenseExperts(layer.w2), routing), out=layer.x, adds=True)


def torch_routed(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    return torch_route(layer.x @ layer.gate.t(), layer.num_chosen)


def torch_route(logits: Tensor, num_chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute weights, slots and group ends with PyTorch's operations."""
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    ranked = probabilities.sort(dim=-1, descending=True, stable=True).indices
    chosen = ranked[:, :num_chosen].sort(dim=-1).values
    weights = probabilities.gather(-1, chosen).to(logits.dtype)
    counts = torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device)
    ones = torch.ones((), dtype=torch.int32, device=logits.device)
    counts.scatter_add_(0, chosen.flatten(), ones.expand(chosen.numel()))
    slots = chosen.flatten().argsort(stable=True)
    return weights, slots, counts.cumsum(0, dtype=torch.int32)


def torch_stage(layer: Layer) -> None:
    """Run the feed-forward stage with PyTorch's grouped product and gathered copies."""
    normed = fused_ops.rms_norm(layer.x, layer.norm, EPS)
    weights, slots, ends = torch_route(normed @ layer.gate.t(), layer.num_chosen)
    rows = normed.index_select(0, slots // layer.num_chosen)
    gate_up = torch._grouped_mm(rows, layer.w1.transpose(-2, -1), offs=ends)
    inner = fused_ops.silu_mul(gate_up)
    down = torch._grouped_mm(inner, layer.w2.transpose(-2, -1), offs=ends)
    terms = torch.empty_like(down)
    terms[slots] = down
    terms = terms.view(*weights.shape, -1).mul_(weights[:, :, None])
    total = terms[:, 0]
    for index in range(1, layer.num_chosen):
        total = total.add_(terms[:, index])
    layer.x.add_(total)


if __name__ == "__main__":
    main()

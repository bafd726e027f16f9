#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of the products of LoRA adapters in a layer, by default LLaDA-8B's.

    benchmarks/kernels/bench_low_rank.py [--rows 32 256 ...] [--rank 16] [--slots 1] [--json FILE]

All times are replays of CUDA graphs over the matrices of several layers in turn. Each product of a
layer has a shrink, which multiplies its rows by the first matrices, and an expand, which adds the
product with the second matrices to a result. The expand of gate and up also computes silu(gate) *
up, so "silu us" is the time of the kernel that it replaces. "cublas" is the time of the same
products if all rows had the first adapter and PyTorch computed them, silu(gate) * up included.
"floor" is the time in which a copy moves the bytes that these kernels read and write. Slots have
equal shares of the rows.

A second table has the time of gate and up as a whole, from rows to silu(gate) * up, with the
checkpoint's weight:

    plain    without adapters, by the kernels that `vllm.diffusion.ops.dispatch` chooses
    stored   a product that includes the products with A, which is stored, and an expand
    tail     a shrink, and a product that also multiplies by B, in tiles of rows
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_timing import KernelParser, compare, copy_bandwidth, random_rows, report
from gather_gemm import LowRank, Piece, Tiles, expand, gated_expand, low_rank_tile, shrink
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.ops import dispatch, plain_projection, silu_mul, take_low, tiles_of, to_device
from vllm_add_llada.cuda_kernels.fused_ops import Epilogue, Tiling, fused_linear

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from torch import Tensor

ROWS = (32, 256, 1024, 4096)
NUM_LAYERS = 4
USES = ("qkv", "out", "gate_up", "down")
NAMES = (*(f"{kind} {use} us" for use in USES for kind in ("shrink", "expand")), "silu us")
COLUMNS = dict.fromkeys(("rows", *NAMES, "all us", "cublas us", "floor us"), ">18.4g")
GATED_COLUMNS = dict.fromkeys(("rows", "plain us", "stored us", "tail us"), ">10.4g")


@dataclass(frozen=True)
class Product:
    """Matrices and rows of one product of a layer."""

    matrices: LowRank
    x: Tensor
    out: Tensor
    low: Tensor
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that both kernels read and write at least."""
        moved = self.x.nbytes + 2 * self.low.nbytes + 2 * self.out.nbytes
        return moved + self.matrices.down.nbytes + self.matrices.up.nbytes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = KernelParser(__doc__, ROWS)
    parser.option("--hidden", 4096, "D, width of the rows")
    parser.option("--kv", 4096, "width of the keys, and of the values")
    parser.option("--width", 12288, "I, inner width")
    parser.option("--rank", 16, "rank of every matrix")
    parser.option("--slots", 1, "adapters")
    parser.option("--repeats", 10, "repeats of each measurement")
    options = parser.parse(arguments)
    title = f"adapters: {options.slots} of rank {options.rank}, bf16"
    report(options.json, title, COLUMNS, (measure(rows, options) for rows in options.rows))
    gated = (measure_gated(rows, options) for rows in options.rows)
    report(None, f"gate and up with {title}", GATED_COLUMNS, gated)


def equal_tiles(num_rows: int, num_slots: int) -> Tiles[torch.Tensor]:
    """Return the tiles of rows of which each slot has an equal share."""
    share = -(-num_rows // num_slots)
    runs = [
        (slot, slot * share, min((slot + 1) * share, num_rows))
        for slot in range(num_slots)
        if slot * share < num_rows
    ]
    on_host = tiles_of(runs, num_rows, low_rank_tile(num_rows))
    tiles: Tiles[torch.Tensor] = to_device(on_host, torch.device("cuda"))
    return tiles


def measure_gated(num_rows: int, options: argparse.Namespace) -> list[float]:
    """Measure a row of the table of gate and up."""
    tiles, columns = equal_tiles(num_rows, options.slots), 2 * options.width
    num_numbers = options.slots * 2 * options.rank
    out = random_rows(num_rows, options.width)
    by_slot = random_rows(num_rows, num_numbers)
    card = dispatch.card_of(out.device)
    extended = dispatch.extended_columns(columns + num_numbers, options.hidden, card=card)
    both = random_rows(num_rows, extended)
    low = both[:, columns : columns + num_numbers].unflatten(1, (options.slots, -1))
    chosen = dispatch.linear_tiling(num_rows, columns, options.hidden, gated=True, card=card)
    tail = dispatch.tail_tiling(num_rows, columns, options.hidden, card=card)
    tail = tail or Tiling(192, rows=128)
    fused = partial(fused_linear, out=out, epilogue=Epilogue.SILU_MUL, early=True)

    def plain(product: Product, weight: Tensor, up: Tensor) -> None:
        if chosen is not None:
            fused(product.x, weight[:columns], tiling=chosen)
            return
        torch.mm(product.x, weight[:columns].t(), out=product.out)
        silu_mul(product.out, out=out)

    def stored(product: Product, weight: Tensor, up: Tensor) -> None:
        plain_projection(weight).project(product.x, both, FreshBuffers(both.device))
        gated_expand(low, product.matrices, tiles, both[:, :columns], out)

    def with_tail(product: Product, weight: Tensor, up: Tensor) -> None:
        shrink(product.x, product.matrices, tiles, product.low, by_slot)
        fused(product.x, weight[:columns], tiling=tail, tail=(by_slot, up))

    layers = [
        (
            product_of(num_rows, options.hidden, [options.width] * 2, options),
            random_rows(extended, options.hidden, scale=options.hidden**-0.5),
            random_rows(columns, num_numbers, scale=options.rank**-0.5),
        )
        for _ in range(NUM_LAYERS)
    ]
    ways = {"plain": plain, "stored": stored, "tail": with_tail}
    calls = {name: [partial(way, *layer) for layer in layers] for name, way in ways.items()}
    times = compare(calls, repeats=options.repeats).values()
    return [num_rows, *(timing.median_us for timing in times)]


def measure(num_rows: int, options: argparse.Namespace) -> list[float]:
    """Measure a row of the table."""
    tiles = equal_tiles(num_rows, options.slots)
    layers = [products_of(num_rows, options) for _ in range(NUM_LAYERS)]
    calls = {}
    for use in USES:
        own = [layer[use] for layer in layers]
        calls[f"shrink {use}"] = [partial(shrink, p.x, p.matrices, tiles, p.low) for p in own]
        calls[f"expand {use}"] = [
            partial(expand, p.low[0], p.matrices, tiles, p.out, p.pieces) for p in own
        ]
    gates = [layer["gate_up"] for layer in layers]
    gated = torch.empty(num_rows, options.width, dtype=torch.bfloat16, device="cuda")
    calls["expand gate_up"] = [
        partial(gated_expand, p.low[0], p.matrices, tiles, p.out, gated) for p in gates
    ]
    calls["silu"] = [partial(silu_mul, p.out, out=gated) for p in gates]
    calls["cublas"] = [partial(by_cublas, layer, gated) for layer in layers]
    times = compare(calls, repeats=options.repeats).values()
    *us, cublas_us = [timing.median_us for timing in times]
    # The expand of gate and up writes half of the columns that it reads.
    num_bytes = sum(p.num_bytes for p in layers[0].values()) - gates[0].out.nbytes // 2
    floor_us = 1e6 * num_bytes / copy_bandwidth()
    return [num_rows, *us, sum(us[:-1]), cublas_us, floor_us]


def by_cublas(layer: dict[str, Product], gated: Tensor) -> None:
    """Compute a layer's products, as if all rows had the first adapter."""
    for product in layer.values():
        matrices, rank = product.matrices, product.matrices.up.shape[1]
        low = torch.mm(product.x, matrices.down[0].flatten(0, 1).t())
        for piece in product.pieces:
            ranks = slice(piece.part * rank, (piece.part + 1) * rank)
            source = matrices.up[0][:, piece.source : piece.source + piece.width]
            target = product.out[:, piece.target : piece.target + piece.width]
            target.addmm_(low[:, ranks], source)
    silu_mul(layer["gate_up"].out, out=gated)


def products_of(num_rows: int, options: argparse.Namespace) -> dict[str, Product]:
    """Make the products of a layer."""
    hidden, width = options.hidden, options.width
    shapes = {
        "qkv": (hidden, [hidden, options.kv, options.kv]),
        "out": (hidden, [hidden]),
        "gate_up": (hidden, [width, width]),
        "down": (width, [hidden]),
    }
    return {use: product_of(num_rows, *shape, options) for use, shape in shapes.items()}


def product_of(
    num_rows: int, depth: int, widths: list[int], options: argparse.Namespace
) -> Product:
    """Make a product with columns of several parts."""
    num_slots, rank, num_parts = options.slots, options.rank, len(widths)
    matrices = LowRank(
        random_rows(num_slots, num_parts, rank, depth, scale=depth**-0.5),
        random_rows(num_slots, rank, sum(widths), scale=rank**-0.5),
        torch.full((num_slots, num_parts), rank, dtype=torch.int32, device="cuda"),
        torch.ones(num_slots, num_parts, device="cuda"),
    )
    starts = [sum(widths[:part]) for part in range(num_parts)]
    return Product(
        matrices,
        random_rows(num_rows, depth),
        random_rows(num_rows, sum(widths)),
        take_low(matrices, num_rows, FreshBuffers(torch.device("cuda"))),
        tuple(
            Piece(part, start, start, width)
            for part, (start, width) in enumerate(zip(starts, widths, strict=True))
        ),
    )


if __name__ == "__main__":
    sys.exit(main())

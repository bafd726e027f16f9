#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Time of every attention backend, and which of them is chosen.

    benchmarks/kernels/bench_attention.py [--families llada dream] [--json FILE]
    benchmarks/kernels/bench_attention.py --tiles [--json FILE]

bf16 random numbers and heads of 128: LLaDA-8B's 32 heads, Dream-7B's 28 with 4 KV heads, and for
windows LLaDA2-mini's 16 with 4 and SDAR-8B's 32 with 8. All times are replays of CUDA graphs over
inputs that do not fit into a cache; the backends run in turns.

    queries x keys  of each sequence; if equal, the keys belong to the queries' own rows
    sdpa        microseconds of torch's scaled_dot_product_attention, one call per sequence: cuDNN
    first ms    of sdpa's first call with a shape, in which cuDNN makes its plan
    flash       microseconds of torch's variable-length kernel
    flash3      microseconds of upstream's FlashAttention 3, if its binary is available
    split       microseconds of our kernel that splits the keys, up to 2,048 queries per sequence
    tiled       microseconds of our kernel for enough queries to fill a Hopper card
    in pages    microseconds of the chosen backend for kept keys, in shuffled pages of a store
    chosen      the backend that the dispatch chooses
    of best     time of the chosen backend over the fastest
    TFLOP/s, TB/s  of the chosen backend: arithmetic, and bytes that must be read and written

--tiles: instead, microseconds of the split kernel with other tiles, for windows in pages.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_timing import KernelParser, attention_flops, compare, report, rotating
from benchmarks.gpu_timing import random_rows as random
from vllm.diffusion.core.pages import PAGE_SIZE
from vllm.diffusion.core.spans import AttentionLayout, PageTable, Span
from vllm.diffusion.layers.attention_backends import Backend, attend, can_serve, choose_backend
from vllm.diffusion.layers.split_attention import CONFIG, SplitConfig, split_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

DEVICE = "cuda"
HEAD_DIM = 128
# query heads; KV heads
NUM_HEADS = {"llada": (32, 32), "dream": (28, 4), "llada2": (16, 4), "sdar": (32, 8)}
# sequences; queries and keys of each
CASES = {
    "llada": (
        *((1, size, size) for size in (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)),
        (1, 65536, 65536),
        *((1, 32, keys) for keys in (256, 1024, 4096, 16384, 65536, 204800)),
        *((1, queries, 4096) for queries in (64, 128, 256, 512, 1024)),
        *((1, 256, 65536), (1, 4096, 65536)),
        *((8, 256, 256), (32, 256, 256), (8, 1024, 1024)),
        *((32, 32, keys) for keys in (256, 2048, 8192)),
    ),
    "dream": (
        *((1, size, size) for size in (256, 1024, 4096, 16384)),
        *((1, 32, keys) for keys in (256, 1024, 4096, 65536)),
        *((1, 128, 4096), (8, 256, 256), (32, 32, 2048)),
    ),
    "llada2": tuple((requests, 32, 1088) for requests in (1, 64, 128)),
    "sdar": (
        *((requests, 4, 1088) for requests in (1, 8, 16, 128)),
        *((8, 8, 1088), (16, 8, 1088), (32, 32, 1088)),
    ),
}
TILE_CASES = {
    "llada": (
        *((1, 32, keys) for keys in (256, 1024, 4096, 65536)),
        *((1, 256, 4096), (1, 512, 512), (8, 256, 256), (32, 32, 2048)),
    ),
    "dream": ((1, 32, 1024), (1, 32, 4096), (1, 32, 65536), (32, 32, 2048)),
    "llada2": CASES["llada2"],
    "sdar": ((8, 4, 1088), (16, 8, 1088), (128, 4, 1088)),
}
TILES = (
    CONFIG,
    replace(CONFIG, programs=4),
    SplitConfig(32, 64, programs=2, num_warps=4, num_stages=3),
    SplitConfig(64, 32, programs=2, num_warps=4, num_stages=4),
    SplitConfig(16, 64, programs=2, num_warps=4, num_stages=3),
    SplitConfig(128, 64, programs=2, num_warps=8, num_stages=3),
)
MAX_SPLIT_QUERIES = 2048
MIN_CALLS = 8  # calls per graph, so that the launch of the graph does not count
CASE = {"family": "<6", "sequences": ">9", "queries x keys": ">16"}
TIMES = ("sdpa", "first ms", "flash", "flash3", "split", "tiled", "in pages", "chosen", "of best")
TIMES += ("TFLOP/s", "TB/s")


@dataclass(frozen=True)
class Case:
    """Sequences of equal shape, and the heads of a family."""

    family: str
    num_sequences: int
    num_queries: int
    num_keys: int

    @property
    def shape(self) -> str:
        return f"{self.num_queries:,} x {self.num_keys:,}"

    @property
    def flops(self) -> float:
        num_heads, _ = NUM_HEADS[self.family]
        one = attention_flops(self.num_queries, self.num_keys, num_heads, HEAD_DIM)
        return self.num_sequences * one

    @property
    def num_bytes(self) -> float:
        num_heads, num_kv_heads = NUM_HEADS[self.family]
        heads = 2 * self.num_queries * num_heads + 2 * self.num_keys * num_kv_heads
        return 2.0 * self.num_sequences * heads * HEAD_DIM

    @property
    def is_window(self) -> bool:
        """Whether its keys may be kept keys, in whole pages."""
        return self.num_queries < self.num_keys and self.num_keys % PAGE_SIZE == 0

    def layout(self, pages: PageTable | None = None) -> AttentionLayout:
        queries, keys = self.num_queries, self.num_keys
        return AttentionLayout.of(
            [
                Span(i * queries, (i + 1) * queries, i * keys, (i + 1) * keys)
                for i in range(self.num_sequences)
            ],
            DEVICE,
            pages,
        )

    @property
    def num_pages(self) -> int:
        return self.num_sequences * self.num_keys // PAGE_SIZE

    def pages(self) -> PageTable:
        """Make a random order of a store's pages.

        Each page holds keys, then values, of one layer.
        """
        order = torch.randperm(self.num_pages, device=DEVICE)
        return PageTable((2 * PAGE_SIZE * order).int(), PAGE_SIZE)

    def stored_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, and views of the store from its first keys and its first values on."""
        num_heads, num_kv_heads = NUM_HEADS[self.family]
        rows = random(2 * PAGE_SIZE * self.num_pages, num_kv_heads, HEAD_DIM)
        q = random(self.num_sequences * self.num_queries, num_heads, HEAD_DIM)
        return q, rows, rows[PAGE_SIZE:]

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values; they are views of a fused product if rows are shared."""
        num_heads, num_kv_heads = NUM_HEADS[self.family]
        num_rows = self.num_sequences * self.num_queries
        split = (num_heads, num_kv_heads, num_kv_heads)
        if self.num_queries == self.num_keys:
            product = random(num_rows, sum(split), HEAD_DIM)
            return product.split(split, dim=1)
        pool = (self.num_sequences * self.num_keys, num_kv_heads, HEAD_DIM)
        return random(num_rows, num_heads, HEAD_DIM), random(*pool), random(*pool)


def cases(shapes: dict[str, Sequence[tuple[int, int, int]]], families: list[str]) -> Iterator[Case]:
    return (Case(family, *shape) for family in families for shape in shapes[family])


def calls_of(
    call: Callable[..., object], inputs: Sequence[tuple[Tensor, ...]]
) -> list[Callable[[], object]]:
    """Make a call for each input, repeated until there are enough calls for a graph."""
    rounds = -(-MIN_CALLS // len(inputs)) if inputs[0][0].shape[0] < 8192 else 1
    return [partial(call, *heads) for heads in inputs] * rounds


def measure(case: Case, repeats: int) -> list[object]:
    """Measure a row of the table."""
    layout, inputs = case.layout(), rotating(case.heads)
    q, k, v = inputs[0]
    backends = [backend for backend in Backend if can_serve(backend, q, layout)]
    if case.num_queries > MAX_SPLIT_QUERIES:
        backends = [backend for backend in backends if backend is not Backend.SPLIT]
    started = time.perf_counter()
    attend(q, k, v, layout, backend=Backend.SDPA)
    torch.cuda.synchronize()
    first_ms = 1000 * (time.perf_counter() - started)
    calls = {
        backend.name: calls_of(partial(attend, layout=layout, backend=backend), inputs)
        for backend in backends
    }
    if case.is_window and Backend.SPLIT in backends:
        paged = partial(attend, layout=case.layout(case.pages()))
        calls["in pages"] = calls_of(paged, rotating(case.stored_heads))
    times = compare(calls, repeats=repeats, warm_up_s=0.02)
    us = {name: timing.median_us for name, timing in times.items()}
    in_pages = us.pop("in pages", None)
    chosen = choose_backend(q, layout).name
    return [
        *(case.family, case.num_sequences, case.shape, rounded(us["SDPA"]), round(first_ms, 1)),
        *(rounded(us.get(name)) for name in ("FLASH", "FLASH3", "SPLIT", "TILED")),
        *(rounded(in_pages), chosen.lower(), round(us[chosen] / min(us.values()), 3)),
        round(case.flops / us[chosen] / 1e6, 1),
        round(case.num_bytes / us[chosen] / 1e6, 2),
    ]


def measure_tiles(case: Case, repeats: int) -> list[object]:
    """Measure a row of the table of tiles."""
    if case.is_window:
        layout, inputs = case.layout(case.pages()), rotating(case.stored_heads)
    else:
        layout, inputs = case.layout(), rotating(case.heads)
    run = partial(split_attention, layout=layout)
    times = compare(
        {name_of(config): calls_of(partial(run, config=config), inputs) for config in TILES},
        repeats=repeats,
        warm_up_s=0.02,
    )
    us = [rounded(timing.median_us) for timing in times.values()]
    return [case.family, case.num_sequences, case.shape, *us]


def name_of(config: SplitConfig) -> str:
    return f"{config.rows}x{config.keys} s{config.num_stages} p{config.programs}"


def rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = KernelParser(__doc__)
    parser.option("--families", list(CASES), "families whose heads are measured", choices=CASES)
    parser.option("--tiles", False, "compare tiles of the split kernel")
    parser.option("--repeats", 10, "repeats of each measurement")
    options = parser.parse(arguments)
    title, names, shapes, run = "attention by backend, bf16", TIMES, CASES, measure
    if options.tiles:
        title, shapes, run = "tiles of the split kernel, bf16, us", TILE_CASES, measure_tiles
        names = tuple(name_of(config) for config in TILES)
    columns = CASE | dict.fromkeys(names, ">11")
    rows = (run(case, options.repeats) for case in cases(shapes, options.families))
    report(options.json, title, columns, rows)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Launch choices of the gather-GEMM, as data."""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class LaunchConfig:
    """Tile of one program and the resources it runs with."""

    block_rows: int
    block_columns: int
    block_depth: int
    num_warps: int
    num_stages: int


def choose_config(num_rows: int, element_bytes: int) -> LaunchConfig:
    """Tile for a number of gathered rows of 2-byte or 4-byte elements.

    Few rows read the weight once and are bound by it: narrow tiles, so that many programs share the
    reading. Many rows are bound by arithmetic: wide tiles, so that operands are used again. The
    pipeline's stages hold at most 96 KiB, which every target has.
    """
    depth = 128 // element_bytes
    if num_rows <= 16:
        return LaunchConfig(16, 64, 2 * depth, num_warps=4, num_stages=4)
    if num_rows <= 32:
        return LaunchConfig(32, 64, 2 * depth, num_warps=4, num_stages=4)
    if num_rows <= 64:
        return LaunchConfig(64, 128, depth, num_warps=4, num_stages=4)
    return LaunchConfig(128, 128, depth, num_warps=8, num_stages=3)


def is_kernel_faster(num_rows: int, element_bytes: int) -> bool:
    """Whether the gather-GEMM kernel beats index_select and matmul on CUDA.

    Measured on one H200 with bf16 [126464, 4096]: 0.94 to 0.99 of their time up to 64 rows, 1.06 at
    96, 1.3 from 256 on. 4-byte products keep all bits, which the kernel does without tensor cores.
    """
    return num_rows <= 64 and element_bytes == 2


@dataclass(frozen=True)
class TopConfig:
    """Tile of one program of the product with its sampling, and the resources it runs with."""

    block_rows: int
    block_columns: int
    block_depth: int
    transposed: bool  # rows are the narrow side of the product on the tensor cores
    num_warps: int
    num_stages: int


# Up to a number of rows, the fastest tile, measured on one H200 with bf16 [126464, 4096]: 235 to
# 270 us from 1 to 128 rows, 0.90 to 0.95 of index_select, matmul and a pass over the stored logits.
# At 256 rows and more PyTorch's product is faster by more than that pass (the best tile took 1.02
# to 1.13 of the time), so there is no entry.
_TOP_CONFIGS = {
    16: TopConfig(16, 128, 128, True, num_warps=4, num_stages=5),
    32: TopConfig(32, 128, 128, True, num_warps=4, num_stages=5),
    64: TopConfig(64, 128, 64, False, num_warps=4, num_stages=6),
    128: TopConfig(128, 256, 64, False, num_warps=8, num_stages=4),
}


def choose_top_config(num_rows: int) -> TopConfig | None:
    """Tile for a number of 2-byte rows; None where storing the product is the faster way."""
    fitting = [most for most in _TOP_CONFIGS if num_rows <= most]
    return _TOP_CONFIGS[min(fitting)] if fitting else None


@dataclass(frozen=True)
class Tiling:
    """What one block of a fused product computes, or a cluster of blocks that share the depth."""

    columns: int  # rows of the weight; of a gated product half of them from each part
    split: int = 1  # blocks of the cluster
    rows: int = 0  # of x; 0: all there are, which are few


@dataclass(frozen=True)
class SkinnyTiling:
    """A tiling for few rows, and for how many of them it was faster."""

    tiling: Tiling
    max_rows: int
    min_rows: int = 1


# Measured on one H200 in CUDA graphs over rotated weights, cuBLAS -> ours in us at 1, 32, 64 and
# 128 rows: 12288 x 4096 (96 columns) 27, 28, 28, 28 -> 24, 25, 26, 28; 4096 x 4096 (64 columns,
# split) 13, 13, 12, 14 -> 10, 10, 11, 13; 4096 x 12288 (the same) 29, 29, 31, 33 -> 25, 25, 26, 30;
# 24576 x 4096 (192 columns) 48, 49, 50, 54 -> 48, 49, 51, 54, so that only a gated product, whose
# second kernel is saved, is worth it. After a norm, at 136, 160, 192 and 256 rows: 4096 x 4096 15,
# 19, 17, 18 -> 16, 16, 16, 19; 4096 x 12288 34, 36, 49, 44 -> 34, 35, 36, 45.
_SKINNY = (
    SkinnyTiling(Tiling(96), max_rows=64),
    SkinnyTiling(Tiling(64, split=2), max_rows=128),
    SkinnyTiling(Tiling(64, split=2), min_rows=144, max_rows=192),
    SkinnyTiling(Tiling(96, split=2), max_rows=64),
    SkinnyTiling(Tiling(32, split=2), max_rows=64),
)
_SKINNY_GATED = (SkinnyTiling(Tiling(192), max_rows=128),)
# The gated product of more rows, 24576 x 4096, cuBLAS and activation -> ours in us at 256, 384,
# 512, 1,024, 2,048 and 8,192 rows: 90, 127, 167, 321, 674, 2,523 -> 83, 121, 154, 300, 640, 2,433.
_GATED = (Tiling(192, rows=256), Tiling(192, rows=128))
_LEAST_USE = 0.9  # of the tiles that the card computes at a time, below which cuBLAS's fit better
_STEP_DEPTH = 64


def choose_tiling(
    num_rows: int, num_columns: int, depth: int, *, gated: bool, multiprocessors: int
) -> Tiling | None:
    """Tiling that keeps (nearly) every multiprocessor busy; None where PyTorch is faster.

    Args:
        num_rows, num_columns, depth: of the product.
        gated: silu(gate) * up is wanted.
        multiprocessors: of the card.
    """
    for skinny in _SKINNY_GATED if gated else _SKINNY:
        tiling = skinny.tiling
        blocks = num_columns // tiling.columns * tiling.split
        if (
            skinny.min_rows <= num_rows <= skinny.max_rows
            and num_columns % tiling.columns == 0
            and depth % (tiling.split * _STEP_DEPTH) == 0
            and 0.84 * multiprocessors <= blocks <= multiprocessors
        ):
            return tiling
    if not gated or num_columns % 16 != 0 or depth % _STEP_DEPTH != 0 or multiprocessors == 0:
        return None
    for tiling in _GATED:
        tiles = ceil(num_rows / tiling.rows) * ceil(num_columns / tiling.columns)
        computed = ceil(tiles / multiprocessors) * multiprocessors
        wanted = num_rows * num_columns
        if wanted > 0 and wanted >= _LEAST_USE * computed * tiling.rows * tiling.columns:
            return tiling
    return None

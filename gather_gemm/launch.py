# SPDX-License-Identifier: Apache-2.0
"""Launch choices of the gather-GEMM, as data."""

from dataclasses import dataclass


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
    """What one cluster of the skinny product computes, and for how many rows it was faster."""

    columns: int  # rows of the weight; of a gated product half of them from each part
    split: int  # blocks of a cluster, which share the depth
    max_rows: int
    min_rows: int = 1


# Measured on one H200 in CUDA graphs over rotated weights, cuBLAS -> ours in us at 1, 32, 64 and
# 128 rows: 12288 x 4096 (96 columns) 27, 28, 28, 28 -> 24, 25, 26, 28; 4096 x 4096 (64 columns,
# split) 13, 13, 12, 14 -> 10, 10, 11, 13; 4096 x 12288 (the same) 29, 29, 31, 33 -> 25, 25, 26, 30;
# 24576 x 4096 (192 columns) 48, 49, 50, 54 -> 48, 49, 51, 54, so that only a gated product, whose
# second kernel is saved, is worth it. After a norm, at 136, 160, 192 and 256 rows: 4096 x 4096 15,
# 19, 17, 18 -> 16, 16, 16, 19; 4096 x 12288 34, 36, 49, 44 -> 34, 35, 36, 45.
_TILINGS = (
    Tiling(96, 1, max_rows=64),
    Tiling(64, 2, max_rows=128),
    Tiling(64, 2, min_rows=144, max_rows=192),
    Tiling(96, 2, max_rows=64),
    Tiling(32, 2, max_rows=64),
)
_GATED_TILINGS = (Tiling(192, 1, max_rows=128),)
_STEP_DEPTH = 64


def choose_tiling(
    num_rows: int, num_columns: int, depth: int, *, gated: bool, multiprocessors: int
) -> Tiling | None:
    """Tiling that gives (nearly) every multiprocessor one block; None where PyTorch is faster.

    Args:
        num_rows, num_columns, depth: of the product.
        gated: silu(gate) * up is wanted.
        multiprocessors: of the card.
    """
    for tiling in _GATED_TILINGS if gated else _TILINGS:
        blocks = num_columns // tiling.columns * tiling.split
        if (
            tiling.min_rows <= num_rows <= tiling.max_rows
            and num_columns % tiling.columns == 0
            and depth % (tiling.split * _STEP_DEPTH) == 0
            and 0.84 * multiprocessors <= blocks <= multiprocessors
        ):
            return tiling
    return None

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


@dataclass(frozen=True)
class TopConfig:
    """Tile of one program of the product with its sampling, and the resources it runs with."""

    block_rows: int
    block_columns: int
    block_depth: int
    transposed: bool  # rows are the narrow side of the product on the tensor cores
    num_warps: int
    num_stages: int


_TOP_CONFIGS = (
    (16, TopConfig(16, 128, 128, True, num_warps=4, num_stages=5)),
    (32, TopConfig(32, 128, 128, True, num_warps=4, num_stages=5)),
    (64, TopConfig(64, 128, 64, False, num_warps=4, num_stages=6)),
    (None, TopConfig(128, 256, 64, False, num_warps=8, num_stages=4)),
)


def choose_top_config(num_rows: int) -> TopConfig:
    """Tile for a number of 2-byte rows."""
    return next(config for most, config in _TOP_CONFIGS if most is None or num_rows <= most)

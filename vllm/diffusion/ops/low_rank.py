# SPDX-License-Identifier: Apache-2.0
"""Low-rank products of rows with slots: tables of tiles, and memory between both products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gather_gemm import MAX_SPLIT_ROWS, LowRank, Tiles, low_rank_splits
from vllm.diffusion.core import stages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.ops.transfer import Array

NO_SLOT = -1
NO_TILE = (NO_SLOT, 0, 0)


def tiles_of(runs: Iterable[tuple[int, int, int]], num_rows: int, size: int) -> Tiles[Array]:
    """Return the tiles of `num_rows` rows, sorted by slot.

    Args:
        runs: slot, first row and end of consecutive rows with a slot.
        num_rows: number of rows; rows outside of all runs get tiles without a slot.
        size: maximum number of rows of a tile.
    """
    slots = np.full(num_rows, NO_SLOT)
    for slot, start, stop in runs:
        slots[start:stop] = slot
    rows = np.argsort(slots, kind="stable").astype(np.int32)
    tiles, first = list[tuple[int, int, int]](), 0
    for slot, count in zip(*np.unique(slots, return_counts=True), strict=True):
        tiles += [(slot, first + row, min(size, count - row)) for row in range(0, count, size)]
        first += count
    return Tiles(np.array(tiles, dtype=np.int32).reshape(-1, 3), rows, size)


def take_low(matrices: LowRank, num_rows: int, scratch: Buffers) -> Tensor:
    """Return memory for the results of `shrink`, [parts of the sum, R, 1, numbers] fp32."""
    num_splits = low_rank_splits(num_rows, matrices.down.shape[3], matrices.num_ranks)
    low = stages.low_rank(matrices.num_ranks).take(scratch, num_splits * num_rows)
    return low.view(num_splits, num_rows, 1, matrices.num_ranks)


def split_bytes(num_ranks: int, depth: int) -> int:
    """Return a bound of the bytes that few rows take in several parts of a sum over `depth`."""
    is_split = low_rank_splits(1, depth, num_ranks) > 1
    return MAX_SPLIT_ROWS * stages.low_rank(num_ranks).row_bytes if is_split else 0

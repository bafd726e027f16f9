# SPDX-License-Identifier: Apache-2.0
"""Low-rank products of rows with slots: tables of tiles, and memory between both products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gather_gemm import MAX_SPLIT_ROWS, LowRank, low_rank_splits
from vllm.diffusion.core import stages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.ops.transfer import Array

NO_SLOT = -1
NO_TILE = (NO_SLOT, 0, 0)


def tile_table(runs: Iterable[tuple[int, int, int]], num_rows: int, size: int) -> Array:
    """Return the tiles [n, 3] int32 of `num_rows` rows: slot, first row, number of rows.

    Args:
        runs: slot, first row and end of consecutive rows with a slot, in ascending order.
        num_rows: number of rows; rows outside of all runs get tiles without a slot.
        size: maximum number of rows of a tile.
    """
    tiles, end = list[tuple[int, int, int]](), 0
    for slot, start, stop in (*runs, (NO_SLOT, num_rows, num_rows)):
        for own, first, last in ((NO_SLOT, end, start), (slot, start, stop)):
            tiles += [(own, row, min(size, last - row)) for row in range(first, last, size)]
        end = stop
    return np.array(tiles, dtype=np.int32).reshape(-1, 3)


def take_low(matrices: LowRank, num_rows: int, scratch: Buffers) -> Tensor:
    """Return memory for the results of `shrink`, [parts of the sum, R, 1, numbers] fp32."""
    num_splits = low_rank_splits(num_rows, matrices.down.shape[3], matrices.num_ranks)
    low = stages.low_rank(matrices.num_ranks).take(scratch, num_splits * num_rows)
    return low.view(num_splits, num_rows, 1, matrices.num_ranks)


def split_bytes(num_ranks: int, depth: int) -> int:
    """Return a bound of the bytes that few rows take in several parts of a sum over `depth`."""
    is_split = low_rank_splits(1, depth, num_ranks) > 1
    return MAX_SPLIT_ROWS * stages.low_rank(num_ranks).row_bytes if is_split else 0

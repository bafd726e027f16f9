# SPDX-License-Identifier: Apache-2.0
"""Uses of a projection, and what plans must know of its weight before it is loaded."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion.ops import dispatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.diffusion.core.stages import Buffer
    from vllm_add_llada.cuda_kernels.fused_ops import Tiling

_SCANNED_ROWS = 16_384


class ProjectionKind(Enum):
    """Uses of a projection, by the names of its methods."""

    PROJECT = "project"
    GATED = "gated"
    ADD_TO = "add_to"


class WeightSpec(NamedTuple):
    """Facts about a weight [columns, depth] of one rank before it is loaded.

    Attributes:
        columns, depth: columns of the product, and number of terms of each sum.
        dtype: dtype of the rows that are multiplied, and of the product.
        has_bias: whether a bias is added.
        device: device of the weight; without an index if the GPU must not be queried.
        is_summed: whether the products of several ranks are summed.
    """

    columns: int
    depth: int
    dtype: torch.dtype
    has_bias: bool
    device: torch.device
    is_summed: bool = False

    def most_stored_rows(self, tiling_of: Callable[..., Tiling | None]) -> int | None:
        """Return the number of rows above which one kernel always runs `gated`; None if unknown.

        The kernel runs if its tiles fill the GPU, as they do with many rows. This is checked row
        by row in the range in which partly filled tiles may still matter.

        Args:
            tiling_of: function that returns that kernel's tiling, such as `dispatch.gated_tiling`.
        """
        is_served = self.dtype == torch.bfloat16 and not self.has_bias
        if not is_served or self.device.type != "cuda" or self.device.index is None:
            return None
        card = dispatch.card_of(self.device)
        for rows in range(_SCANNED_ROWS, 0, -1):
            if tiling_of(rows, self.columns, self.depth, card=card) is None:
                return rows if rows <= _SCANNED_ROWS // 2 else None
        return 0


class Workspace(NamedTuple):
    """Scratch memory of one use of a projection.

    Attributes:
        buffers: buffers that it takes.
        most_rows: rows above which it takes the buffers `beyond` instead; None for no limit.
        beyond: the buffers for more rows.
    """

    buffers: tuple[Buffer, ...] = ()
    most_rows: int | None = None
    beyond: tuple[Buffer, ...] = ()

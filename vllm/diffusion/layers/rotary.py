# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al. 2021), half-split pairing: element j pairs with j + rd/2."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.layers.yarn import write_factors

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.positions import QueryGrowth
    from vllm.diffusion.core.stages import Buffers


class Rotary(NamedTuple):
    """Rotary table rows, one for each row of the batch.

    The dtype of the tables determines the arithmetic: fp32 tables rotate in fp32 and cast back;
    tables in the model's dtype rotate in that dtype. `scale`, if given, is a factor of rotated
    queries.
    """

    cos: Tensor  # [R, rd]
    sin: Tensor  # [R, rd]
    scale: Tensor | None = None  # [R], in the dtype of the tables

    def rows(self, chunk: slice | Tensor) -> Rotary:
        """Return the rows of a chunk, or the rows at indices [R] int64."""
        scale = None if self.scale is None else self.scale[chunk]
        return Rotary(self.cos[chunk], self.sin[chunk], scale)

    def select(self, rows: Tensor, buffers: Buffers) -> Rotary:
        """Copy single rows [R] int64 into `buffers`."""
        scales = self.scale is not None
        tables = stages.rotary(self.cos.dtype, self.cos.shape[1], scales=scales, is_read=True)
        copies = Rotary(*(table.take(buffers, rows.numel()) for table in tables))
        for table, out in zip(self, copies, strict=True):
            if table is not None:
                torch.index_select(table, 0, rows, out=out)
        return copies


def inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """Return theta^(-2j/rd), [rd / 2] fp32 on the default device, in radians per position.

    A model computes them once, with its weights, because the last bit of a power depends on the
    device.

    Args:
        theta: base of the frequencies.
        rotary_dim: rd, the number of rotated channels of a head.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32)
    return 1.0 / theta ** (exponents / rotary_dim)


def rotary_rows(
    positions: Tensor,
    frequencies: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    buffers: Buffers | None = None,
    growth: QueryGrowth | None = None,
) -> Rotary:
    """Compute cos and sin of position * frequency, each twice side by side.

    Only the given positions are computed, so no table of the longest sequence is stored.

    Args:
        positions: [R] integers, from 0.
        frequencies: [rd / 2] fp32, from `inverse_frequencies`.
        dtype: dtype of the tables, which are computed in fp32 and cast.
        buffers: memory for the tables; None allocates.
        growth: growth of queries with their position; None for no growth.

    Returns:
        tables of shape [R, rd].
    """
    buffers = FreshBuffers(positions.device) if buffers is None else buffers
    table_buffers = stages.rotary(dtype, 2 * frequencies.numel(), scales=growth is not None)
    rotary = Rotary(*(table.take(buffers, positions.numel()) for table in table_buffers))
    ops.rotary_tables(positions, frequencies, rotary.cos, rotary.sin)
    if growth is not None and rotary.scale is not None:
        write_factors(positions, growth, rotary.scale)
    return rotary

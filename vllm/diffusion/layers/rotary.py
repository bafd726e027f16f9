# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al. 2021), half-split pairing: element j pairs with j + rd/2."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion.layers.buffers import FreshBuffers

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.layers.buffers import Buffers


class Rotary(NamedTuple):
    """Table rows of the positions in use, one row per row of the batch.

    The dtype of the tables says how to rotate: fp32 tables rotate in fp32 and cast back, tables
    in the model's dtype rotate in that dtype.
    """

    cos: Tensor  # [R, rd]
    sin: Tensor  # [R, rd]

    def rows(self, chunk: slice) -> Rotary:
        """The rows of a chunk."""
        return Rotary(self.cos[chunk], self.sin[chunk])

    def select(self, rows: Tensor, buffers: Buffers) -> Rotary:
        """Copies of single rows [R] int64, in `buffers`."""

        def copied(name: str, table: Tensor) -> Tensor:
            out = buffers.take(name, (rows.numel(), table.shape[1]), table.dtype)
            return torch.index_select(table, 0, rows, out=out)

        return Rotary(copied("read cos", self.cos), copied("read sin", self.sin))


def rotary_rows(
    positions: Tensor,
    *,
    theta: float,
    rotary_dim: int,
    dtype: torch.dtype = torch.float32,
    buffers: Buffers | None = None,
) -> Rotary:
    """cos and sin of position * theta^(-2j/rd), twice side by side.

    Only the given positions are computed: nothing of the size of the longest sequence is stored.

    Args:
        positions: [R] integers, from 0.
        theta: base of the frequencies.
        rotary_dim: rd, the number of rotated channels of a head.
        dtype: of the tables; they are computed in fp32 and cast.
        buffers: where the tables are to lie; None allocates.

    Returns:
        tables of shape [R, rd].
    """
    buffers = FreshBuffers(positions.device) if buffers is None else buffers
    num_rows, half = positions.numel(), rotary_dim // 2
    cos = buffers.take("cos", (num_rows, rotary_dim), dtype)
    sin = buffers.take("sin", (num_rows, rotary_dim), dtype)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device)
    inverse_frequencies = 1.0 / theta ** (exponents / rotary_dim)
    with buffers.scope("rotary"):
        angles = buffers.take("angles", (num_rows, half), torch.float32)
        table = buffers.take("half a table", (num_rows, half), torch.float32)
        torch.mul(positions[:, None], inverse_frequencies, out=angles)
        for function, out in ((torch.cos, cos), (torch.sin, sin)):
            function(angles, out=table)
            out[:, :half] = table
            out[:, half:] = table
    return Rotary(cos, sin)

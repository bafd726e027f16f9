# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al. 2021), half-split pairing: element j pairs with j + rd/2."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.core.buffers import FreshBuffers

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.buffers import Buffers


class Rotary(NamedTuple):
    """Rotary table rows, one for each row of the batch.

    The dtype of the tables decides the arithmetic: fp32 tables rotate in fp32 and cast back, tables
    in the model's dtype rotate in that dtype.
    """

    cos: Tensor  # [R, rd]
    sin: Tensor  # [R, rd]

    def rows(self, chunk: slice) -> Rotary:
        """Return the rows of a chunk."""
        return Rotary(self.cos[chunk], self.sin[chunk])

    def select(self, rows: Tensor, buffers: Buffers) -> Rotary:
        """Copy single rows [R] int64 into `buffers`."""
        listed = stages.rotary(self.cos.dtype, self.cos.shape[1], is_read=True)
        copies = Rotary(*(table.take(buffers, rows.numel()) for table in listed))
        for table, out in zip(self, copies, strict=True):
            torch.index_select(table, 0, rows, out=out)
        return copies


def inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    """Return theta^(-2j/rd), [rd / 2] fp32 on the default device, in radians a position.

    A model makes them once, with its weights: the last bit of a power depends on the device.

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
) -> Rotary:
    """Compute cos and sin of position * frequency, each twice side by side.

    Only the given positions are computed: nothing of the size of the longest sequence is stored.

    Args:
        positions: [R] integers, from 0.
        frequencies: [rd / 2] fp32, of `inverse_frequencies`.
        dtype: dtype of the tables, which are computed in fp32 and cast.
        buffers: memory for the tables; None allocates.

    Returns:
        tables of shape [R, rd].
    """
    buffers = FreshBuffers(positions.device) if buffers is None else buffers
    listed = stages.rotary(dtype, 2 * frequencies.numel())
    rotary = Rotary(*(table.take(buffers, positions.numel()) for table in listed))
    ops.rotary_tables(positions, frequencies, *rotary)
    return rotary

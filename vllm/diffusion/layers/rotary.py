# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al. 2021), half-split pairing: element j pairs with j + rd/2."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor


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

    def select(self, rows: Tensor) -> Rotary:
        """Copies of single rows [R] int64."""
        return Rotary(self.cos.index_select(0, rows), self.sin.index_select(0, rows))


def rotary_rows(
    positions: Tensor, *, theta: float, rotary_dim: int, dtype: torch.dtype = torch.float32
) -> Rotary:
    """cos and sin of position * theta^(-2j/rd), twice side by side.

    Only the given positions are computed: nothing of the size of the longest sequence is stored.

    Args:
        positions: [R] integers, from 0.
        theta: base of the frequencies.
        rotary_dim: rd, the number of rotated channels of a head.
        dtype: of the tables; they are computed in fp32 and cast.

    Returns:
        tables of shape [R, rd].
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device)
    inverse_frequencies = 1.0 / theta ** (exponents / rotary_dim)
    angles = positions.to(torch.float32)[:, None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return Rotary(angles.cos().to(dtype), angles.sin().to(dtype))

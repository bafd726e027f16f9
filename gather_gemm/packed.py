# SPDX-License-Identifier: Apache-2.0
"""Matrices of 4-bit numbers: how they are packed, and how they are made plain again.

Neighbours along the depth form groups with a scale, and maybe a zero point, of their own. Within a
group of G numbers, byte j holds number j in its low half and number j + G / 2 in its high half, so
that the bytes of a group make two contiguous runs. On CUDA a Triton kernel unpacks; without Triton
the reference runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._triton import can_take, guard, load_kernels

_kernels = load_kernels("packed_kernel")


class Packed(NamedTuple):
    """A matrix [N, K] of 4-bit numbers q in groups of G along K.

    Attributes:
        values: uint8 [N, K / 2], packed.
        scales: fp32 [N, K / G].
        zeros: uint8 [N, K / G]: the numbers mean (q - zero) * scale; None: table[q] * scale.
        table: fp32 [16], where there are no zeros.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    table: Tensor | None = None

    @property
    def group(self) -> int:
        """G."""
        return 2 * self.values.shape[1] // self.scales.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.values.shape[0], 2 * self.values.shape[1]

    def rows(self, rows: slice) -> Packed:
        """Some rows of the matrix."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return Packed(self.values[rows], self.scales[rows], zeros, self.table)


def pack(numbers: Tensor, group: int) -> Tensor:
    """4-bit numbers [N, K], any integer dtype, as bytes [N, K / 2]; G divides K and is even."""
    halves = numbers.to(torch.uint8).unflatten(1, (-1, 2, group // 2))
    packed: Tensor = halves[:, :, 0] | halves[:, :, 1] << 4
    return packed.flatten(1)


def unpack(packed: Packed, out: Tensor) -> None:
    """Write the matrix that is meant.

    Args:
        packed: [N, K]; rows may be strided.
        out: [N, K] bf16, fp16 or fp32, contiguous; each number is rounded once.

    Raises:
        ValueError: A shape, dtype or device is not as above.
    """
    values, scales, zeros, table = packed
    num_groups = scales.shape[1]
    fits = tuple(out.shape) == packed.shape and num_groups * packed.group == out.shape[1]
    if not fits or not out.is_contiguous() or values.dtype != torch.uint8:
        raise ValueError(
            f"unpack: wanted bytes [N, K / 2] and out [N, K] contiguous, got {values.dtype} "
            f"{list(values.shape)}, scales {list(scales.shape)} and {list(out.shape)}"
        )
    if (zeros is None) == (table is None) or scales.dtype != torch.float32:
        raise ValueError("unpack: wanted scales in fp32, and either zeros or a table")
    if out.numel() == 0:
        return
    if _kernels is None or not can_take(out):
        out.copy_(_meant(packed))
        return
    with guard(out):
        _kernels.launch_unpack(values, scales, zeros, table, out)


def _meant(packed: Packed) -> Tensor:
    """The same in PyTorch, fp32."""
    values, scales, zeros, table = packed
    runs = values.unflatten(1, (scales.shape[1], -1))
    numbers = torch.cat((runs & 15, runs >> 4), dim=2)  # [N, groups, G]
    if table is not None:
        plain = table[numbers.long()]
    else:
        assert zeros is not None
        plain = numbers.float() - zeros.float()[:, :, None]
    return (plain * scales[:, :, None]).flatten(1)

# SPDX-License-Identifier: Apache-2.0
"""Matrices of 4-bit or fp8 numbers in groups: packing and unpacking.

Consecutive numbers along the depth form groups, each with a scale and possibly a zero point. A byte
holds two numbers, the first in its low half. If the depth is a multiple of 128, each strip of 128
numbers is stored in the order in which a kernel for tensor cores reads them (`STRIP`). Otherwise
the numbers are stored in their natural order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ._support import has_kernel, launch, native

_FP8 = torch.float8_e4m3fn

# The order of the numbers in a strip. Four threads hold a row of a tensor core's operand, and each
# has 16 bytes of the strip, which are four words of 32 bits. A word holds the numbers that the
# thread needs for 32 of the depth. Numbers i and i + 4 of a word are neighbours along the depth.
STRIP = tuple(
    32 * word + 8 * i + 2 * thread + neighbour
    for thread in range(4)
    for word in range(4)
    for neighbour in range(2)
    for i in range(4)
)


class Packed(NamedTuple):
    """A matrix [N, K] of numbers q in groups of G along K.

    Attributes:
        values: uint8 [N, K / 2], packed 4-bit numbers; or fp8 (e4m3) [N, K], which represent
            q * scale.
        scales: fp32 [N, K / G].
        zeros: uint8 [N, K / G]: 4-bit numbers represent (q - zero) * scale. None: they represent
            table[q] * scale.
        table: fp32 [16], if there are no zeros.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    table: Tensor | None = None

    @property
    def group(self) -> int:
        """Number of elements G per group."""
        return self.shape[1] // self.scales.shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows N and depth K."""
        num_rows, num_bytes = self.values.shape
        return num_rows, num_bytes if self.values.dtype == _FP8 else 2 * num_bytes

    def rows(self, rows: slice) -> "Packed":
        """Return a slice of the rows of the matrix."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return Packed(self.values[rows], self.scales[rows], zeros, self.table)


def pack(numbers: Tensor) -> Tensor:
    """Pack 4-bit numbers [N, K], any integer dtype, into bytes [N, K / 2]; K is even."""
    numbers = numbers.to(torch.uint8)
    if _has_strips(numbers.shape[1]):
        numbers = numbers.unflatten(1, (-1, len(STRIP)))[:, :, list(STRIP)].flatten(1)
    packed: Tensor = numbers[:, ::2] | numbers[:, 1::2] << 4
    return packed


def _has_strips(depth: int) -> bool:
    return depth % len(STRIP) == 0


def _numbers_in(values: Tensor) -> Tensor:
    """Return the numbers that were packed, uint8 [N, K]."""
    numbers = torch.stack((values & 15, values >> 4), dim=2).flatten(1)
    if _has_strips(numbers.shape[1]):
        places = torch.tensor(STRIP, device=values.device).argsort()
        numbers = numbers.unflatten(1, (-1, len(STRIP)))[:, :, places].flatten(1)
    return numbers


def unpack(packed: Packed, out: Tensor) -> None:
    """Write the matrix that a packed matrix represents.

    Args:
        packed: [N, K]; rows may be strided.
        out: [N, K] bf16, fp16 or fp32, contiguous; each number is rounded once.

    Raises:
        ValueError: A shape, dtype or device is not as above.
    """
    values, scales, zeros, table = packed
    fits = tuple(out.shape) == packed.shape and scales.shape[1] * packed.group == out.shape[1]
    if not fits or not out.is_contiguous() or values.dtype not in (torch.uint8, _FP8):
        raise ValueError(
            f"unpack: wanted bytes [N, K / 2] or fp8 [N, K], and out [N, K] contiguous, got "
            f"{values.dtype} {list(values.shape)}, scales {list(scales.shape)} and "
            f"{list(out.shape)}"
        )
    wanted = 0 if values.dtype == _FP8 else 1
    if (zeros is not None) + (table is not None) != wanted or scales.dtype != torch.float32:
        raise ValueError("unpack: wanted scales in fp32, and of 4 bits either zeros or a table")
    if out.numel() == 0:
        return
    if not _has_unpack(packed, out):
        out.copy_(_unpacked(packed))
        return
    assert native is not None
    launch(
        native.unpack,
        out,
        values=values.data_ptr(),
        scales=scales.data_ptr(),
        zeros=0 if zeros is None else zeros.data_ptr(),
        table=0 if table is None else table.data_ptr(),
        out=out.data_ptr(),
        values_stride=values.stride(0),
        scales_stride=scales.stride(0),
        num_rows=out.shape[0],
        depth=out.shape[1],
        group=packed.group,
        is_fp8=values.dtype == _FP8,
    )


def _has_unpack(packed: Packed, out: Tensor) -> bool:
    """Whether the kernel can read and write these tensors."""
    values, scales, zeros, _ = packed
    return (
        has_kernel(out)
        and out.dtype == torch.bfloat16
        and _has_strips(out.shape[1])
        and packed.group % 32 == 0
        and values.stride(1) == scales.stride(1) == 1
        and (zeros is None or zeros.stride() == scales.stride())
        and values.stride(0) % 16 == 0
        and values.data_ptr() % 16 == 0
        and out.data_ptr() % 16 == 0
    )


def _unpacked(packed: Packed) -> Tensor:
    """Unpack to fp32 in PyTorch."""
    values, scales, zeros, table = packed
    if values.dtype == _FP8:
        groups = values.float().unflatten(1, (scales.shape[1], -1))
        wide: Tensor = (groups * scales[:, :, None]).flatten(1)
        return wide
    numbers = _numbers_in(values).unflatten(1, (scales.shape[1], -1))  # [N, groups, G]
    if table is not None:
        plain = table[numbers.long()]
    else:
        assert zeros is not None
        plain = numbers.float() - zeros.float()[:, :, None]
    return (plain * scales[:, :, None]).flatten(1)

# SPDX-License-Identifier: Apache-2.0
"""Products of bf16 rows and a weight of 4-bit numbers, which is read as it is stored."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ._linear import PORTABLE, Epilogue, Tiling
from ._packed import Packed
from ._portable import has_portable_packed, launch_portable
from ._support import (
    ahead_of,
    capability_of,
    check_vector,
    feeds_tensor_cores,
    launch,
    native,
    takes_pairs,
)

_GROUPS = (64, 128)
_STRIP = 128


def look_up_table(table: Sequence[float]) -> tuple[int, ...]:
    """Convert 16 numbers, rounded to bf16, for the kernel's table look-up; for G = 64 only.

    Raises:
        ValueError: Two numbers eight apart differ in their signs, or in the parity of their
            exponents.
    """
    wide = [struct.unpack("<I", struct.pack("<f", number))[0] for number in table]
    # round to nearest, ties to even
    halves = [(bits + 0x7FFF + (bits >> 16 & 1)) >> 16 for bits in wide]
    words: list[int] = []
    for shift in (8, 0):
        low = [half >> shift & 255 for half in halves[:8]]
        high = [half >> shift & 255 for half in halves[8:]]
        if any((a ^ b) & 128 for a, b in zip(low, high, strict=True)):
            raise ValueError(
                f"look_up_table: given {list(table)}; wanted numbers of one sign and parity of the "
                "exponent eight apart"
            )
        high = [b ^ (255 if a & 128 else 0) for a, b in zip(low, high, strict=True)]
        words += struct.unpack("<4I", bytes(low + high))
    return tuple(words)


def has_packed_linear(x: Tensor, weight: Packed) -> bool:
    """Whether `fused_linear_packed` has kernels for rows x [R, K] and a matrix [N, K].

    On a card of compute capability 9.0 the rows must be bf16. On other cards `has_portable_packed`
    decides.
    """
    if has_portable_packed(x, weight) and capability_of(x.device.index) != (9, 0):
        return True
    values, depth = weight.values, weight.shape[1]
    return (
        feeds_tensor_cores(x)
        and values.dtype == torch.uint8
        and weight.group in (_GROUPS if weight.table is None else _GROUPS[:1])
        and depth % (2 * _STRIP) == 0
        and values.stride(1) == 1
        and values.stride(0) % 16 == 0
        and values.data_ptr() % 16 == 0
    )


def fused_linear_packed(
    x: Tensor,
    weight: Packed,
    out: Tensor,
    *,
    tiling: Tiling,
    look_up: tuple[int, ...] = (),
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    early: bool = False,
    ahead: Tensor | None = None,
) -> None:
    """Compute `fused_linear` with a matrix of 4-bit numbers; requires `has_packed_linear`.

    Products of few rows use the unrounded numbers, except that entries of a table are rounded to
    bf16. For more rows the numbers are rounded as by `unpack`. Sums are fp32, in an order that
    depends only on the tiling.

    Args:
        x: [R, K] bf16; rows may be strided.
        weight: [N, K], in groups of 128 or 64; with a table in groups of 64.
        out: [R, N], or [R, N / 2] for SILU_MUL, bf16, written; rows may be strided.
        tiling: 64 or 192 columns for blocks of 64 rows (its `rows` is 0), 128 or 192 columns for
            blocks of 128 rows, 128 columns for blocks of 256 rows. Columns must divide N. The
            split is at most K / 256, divides a quarter of the columns, and is a cluster size
            that the card supports. Every block reads its columns again, and has room for about
            16,000 scales.
            Or `PORTABLE`, which also supports fp16, and groups of any multiple of 32 that divides
            128 or is a multiple of 128.
        look_up: result of `look_up_table` for the weight's table.
        bias: [N] bf16; not with SILU_MUL.
        epilogue, early, ahead: as for `fused_linear`.

    Raises:
        ValueError: A shape, dtype or device is not as above.
        RuntimeError: There is no kernel for the tiling, or it does not divide the shape.
    """
    is_portable = tiling == PORTABLE
    has_kernel = has_portable_packed if is_portable else has_packed_linear
    _check(x, weight, out, bias, epilogue, look_up, has_kernel=has_kernel(x, weight))
    if is_portable:
        number = getattr(native, epilogue.name)
        launch_portable(x, weight, out, bias, number, look_up=look_up)
        return
    _launch_packed(x, weight, out, tiling, look_up or (0,) * 8, bias, epilogue, early, ahead)


def _launch_packed(
    x: Tensor,
    weight: Packed,
    out: Tensor,
    tiling: Tiling,
    table: tuple[int, ...],
    bias: Tensor | None,
    epilogue: Epilogue,
    early: bool,
    ahead: Tensor | None,
) -> None:
    """Enqueue the kernel for Hopper on checked tensors."""
    values, scales, zeros, _ = weight
    assert native is not None
    launch(
        native.packed_linear,
        x,
        x=x.data_ptr(),
        values=values.data_ptr(),
        scales=scales.data_ptr(),
        zeros=0 if zeros is None else zeros.data_ptr(),
        table=table,
        bias=0 if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        values_stride=values.stride(0),
        scales_stride=scales.stride(0),
        out_stride=out.stride(0),
        num_rows=len(x),
        num_columns=len(values),
        depth=x.shape[1],
        group=weight.group,
        epilogue=getattr(native, epilogue.name),
        tiling=(tiling.rows, tiling.columns, tiling.split),
        early=early,
        ahead=ahead_of(ahead),
    )


def _check(
    x: Tensor,
    weight: Packed,
    out: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
    look_up: tuple[int, ...],
    *,
    has_kernel: bool,
) -> None:
    op, (values, scales, zeros, _) = "fused_linear_packed", weight
    if x.dim() != 2 or len(x) == 0 or not has_kernel:
        raise ValueError(
            f"{op}: wanted rows [R, K] and a matrix in groups that a kernel of the card's compute "
            f"capability takes, got {x.dtype} "
            f"{list(x.shape)} on {x.device}, {list(values.shape)} bytes "
            f"and {list(scales.shape)} scales"
        )
    num_columns, depth = len(values), x.shape[1]
    check_vector(op, "weight.scales", scales, (torch.float32,), (num_columns, -1), x.device)
    if zeros is not None:
        check_vector(op, "weight.zeros", zeros, (torch.uint8,), tuple(scales.shape), x.device)
    is_gated = epilogue is Epilogue.SILU_MUL
    fits = out.shape == (len(x), num_columns // (2 if is_gated else 1))
    is_even = takes_pairs(out)
    if 2 * values.shape[1] != depth or not fits or out.dtype != x.dtype or not is_even:
        raise ValueError(
            f"{op}: wanted a matrix of depth {depth} and rows of its columns, got "
            f"{list(values.shape)} bytes and out {out.dtype} {list(out.shape)}"
        )
    if (zeros is None) != bool(look_up) or (is_gated and bias is not None):
        raise ValueError(f"{op}: wanted either zeros or look_up, and no bias with SILU_MUL")
    if bias is not None:
        check_vector(op, "bias", bias, (x.dtype,), (num_columns,), x.device)

# SPDX-License-Identifier: Apache-2.0
"""Products fused with the operation that follows them: products of few rows, and gated ones."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn.functional import silu

from ._portable import has_portable, launch_portable, takes_columns
from ._support import ahead_of, feeds_tensor_cores, launch, native, takes_pairs


class Epilogue(Enum):
    """Operation on a product before it is written."""

    STORE = "store"  # out = x W^T + b
    RESIDUAL = "residual"  # out += x W^T + b, rounded once
    SILU_MUL = "silu_mul"  # out = silu(g) * u, where x W^T consists of g and then u


@dataclass(frozen=True)
class Tiling:
    """Tile of one block of the kernel, or of a cluster of blocks that share the depth.

    These kernels exist in bf16:

    - 96 columns, or 32 split in two or four, for at most 64 rows
    - 96 columns split in two, for at most 128 rows
    - 64 columns split in two, for at most 192 rows
    - 192 columns for at most 128 rows, for STORE
    - for SILU_MUL: 48 or 96 columns for at most 64 rows, 192 for at most 128 rows, or tiles of 128
      or 256 rows

    In fp8:

    - 64 columns for at most 256 rows
    - 96 columns, not split, also for 129 to 256 rows
    - 96 columns split in two, and 192 columns, for at most 64 rows
    - tiles of 128 or 256 rows
    """

    columns: int  # rows of the weight; a gated product takes half of them from each part
    split: int = 1  # blocks per cluster
    rows: int = 0  # rows of x; 0: all rows, which must be few


# The kernel for all cards of compute capability 8.0 and later, in bf16, fp16 or 4-bit numbers, and
# from 8.9 on in fp8. It supports any number of rows, but is meant for few. N must be a multiple of
# 16.
PORTABLE = Tiling(columns=128, split=0)


def has_fused_linear(x: Tensor, weight: Tensor) -> bool:
    """Whether `fused_linear` has kernels for rows x [R, D] and a matrix [N, D]."""
    return feeds_tensor_cores(x, weight) or has_portable(x, weight)


def fused_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None = None,
    *,
    tiling: Tiling | None = None,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    early: bool = False,
    ahead: Tensor | None = None,
    tail: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute x W^T fused with the operation that follows it.

    Tilings run in bf16 on a card of compute capability 9.0. With `PORTABLE` the product runs in
    bf16 or fp16 on any card from 8.0 on.

    Sums are fp32. For a given tiling their order depends neither on the number of rows nor on the
    other rows. Without a tiling, or if there is no kernel for the tensors (see `has_fused_linear`),
    PyTorch computes the product.

    Args:
        x: [R, D]; rows may be strided.
        weight: [N, D], of the dtype of x; rows may be strided.
        out: [R, N], or [R, N / 2] for SILU_MUL; rows may be strided. Allocated when not given;
            required for RESIDUAL.
        tiling: tiling of the kernel. Its columns must divide N (except for tiles of rows), and its
            split times 64 must divide the depth.
        bias: [N]; not with SILU_MUL.
        epilogue: operation on the product before it is written. For SILU_MUL both halves, silu and
            the result are rounded as separate operations would round them.
        early: allow the kernel to read the weight, and that of the tail, while the previous kernel
            of the stream ends, which must not write them. Not with `PORTABLE`.
        ahead: contiguous; data that the next kernel reads first. This kernel fetches it into the
            cache once all of the weight has been requested. Not with tiles of rows or `PORTABLE`.
        tail: rows [R, K] and a weight [N, K], with the dtype and device of x; rows may be strided.
            Their product is added before the sums are rounded. Only with tiles of rows, for which K
            must be a multiple of 8, and with PyTorch.

    Returns:
        `out`, or a new tensor.

    Raises:
        ValueError: A shape, dtype or device is not as above.
        RuntimeError: There is no kernel for the tiling, or it does not divide the shape.
    """
    _check(x, weight, out, bias, epilogue)
    if tail is not None:
        _check_like("fused_linear", "tail", tail[0], x, (len(x), -1))
        _check_like("fused_linear", "tail", tail[1], x, (len(weight), tail[0].shape[1]))
    can_add = tail is None or (tiling != PORTABLE and feeds_tensor_cores(*tail))
    if tiling is None or not (can_add and _has_kernel(x, weight, out, tiling)):
        return _reference(x, weight, out, bias, epilogue, tail)
    if out is None:
        num_halves = 2 if epilogue is Epilogue.SILU_MUL else 1
        out = x.new_empty(len(x), len(weight) // num_halves)
    bias = None if bias is None else bias.contiguous()
    launch_linear(x, weight, out, tiling, bias, epilogue, early=early, ahead=ahead, tail=tail)
    return out


def launch_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    tiling: Tiling,
    bias: Tensor | None,
    epilogue: Epilogue,
    *,
    early: bool,
    ahead: Tensor | None,
    scales: tuple[Tensor, Tensor] | None = None,
    tail: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Enqueue the kernel on checked tensors; `scales` are the scales of fp8 x and weight."""
    assert native is not None
    if tiling == PORTABLE:
        number = getattr(native, epilogue.name)
        launch_portable(x, weight, out, bias, number, scales=scales)
        return
    of_x, of_weight = (0, 0) if scales is None else (scales[0].data_ptr(), scales[1].data_ptr())
    launch(
        native.linear,
        out,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        x_scales=of_x,
        weight_scales=of_weight,
        bias=0 if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        weight_stride=weight.stride(0),
        out_stride=out.stride(0),
        num_rows=len(x),
        num_columns=len(weight),
        depth=weight.shape[1],
        epilogue=getattr(native, epilogue.name),
        tiling=(tiling.rows, tiling.columns, tiling.split),
        early=early,
        ahead=ahead_of(ahead),
        tail=_tail_of(tail),
    )


def _tail_of(tail: tuple[Tensor, Tensor] | None) -> tuple[int, int, int, int, int]:
    """Convert the tail for the kernels: addresses, strides of rows, and depth."""
    if tail is None:
        return 0, 0, 0, 0, 0
    rows, weight = tail
    return rows.data_ptr(), weight.data_ptr(), rows.stride(0), weight.stride(0), rows.shape[1]


def _reference(
    x: Tensor,
    weight: Tensor,
    out: Tensor | None,
    bias: Tensor | None,
    epilogue: Epilogue,
    tail: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute `fused_linear` in PyTorch."""
    if tail is not None:
        x, weight = torch.cat([x, tail[0]], dim=1), torch.cat([weight, tail[1]], dim=1)
    if epilogue is Epilogue.RESIDUAL:
        assert out is not None
        if bias is not None:
            return out.add_(torch.addmm(bias, x, weight.t()))
        return out.addmm_(x, weight.t())
    if epilogue is Epilogue.SILU_MUL:
        return gated(torch.mm(x, weight.t()), out)
    if bias is not None:
        return torch.addmm(bias, x, weight.t(), out=out)
    return torch.mm(x, weight.t(), out=out)


def gated(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up from a tensor that holds the gate and then the up half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.mul(silu(gate), up, out=out)


def _has_kernel(x: Tensor, weight: Tensor, out: Tensor | None, tiling: Tiling) -> bool:
    """Whether the kernel can read these tensors, and write rows with the strides of `out`."""
    if len(x) == 0:
        return False
    if tiling == PORTABLE:
        return has_portable(x, weight) and takes_columns(weight, out)
    if not feeds_tensor_cores(x, weight):
        return False
    if out is None:
        return True
    if tiling.rows > 0:  # Tiles of rows write eight elements at once; other tilings write two.
        return feeds_tensor_cores(out)
    return takes_pairs(out)


def _check(
    x: Tensor, weight: Tensor, out: Tensor | None, bias: Tensor | None, epilogue: Epilogue
) -> None:
    op, gated = "fused_linear", epilogue is Epilogue.SILU_MUL
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"{op}: x must be [R, D] floating, got {x.dtype} {list(x.shape)}")
    _check_like(op, "weight", weight, x, (-1, x.shape[1]))
    if gated and (len(weight) % 2 != 0 or bias is not None):
        raise ValueError(
            f"{op}: SILU_MUL requires a weight of two equal halves and no bias, "
            f"got {list(weight.shape)} and {'a' if bias is not None else 'no'} bias"
        )
    if bias is not None:
        _check_like(op, "bias", bias, x, (len(weight),))
    if out is not None:
        _check_like(op, "out", out, x, (len(x), len(weight) // 2 if gated else len(weight)))
    elif epilogue is Epilogue.RESIDUAL:
        raise ValueError(f"{op}: RESIDUAL adds to out, got None")


def _check_like(op: str, argument: str, tensor: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        wanted in (-1, given) for wanted, given in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != x.dtype or tensor.device != x.device:
        wanted_shape = ["any" if size == -1 else size for size in shape]
        raise ValueError(
            f"{op}: {argument} must be {wanted_shape} {x.dtype} on {x.device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )

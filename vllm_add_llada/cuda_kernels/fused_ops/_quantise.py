# SPDX-License-Identifier: Apache-2.0
"""fp8 rows with a scale each, made in one pass with the operation before, and their products.

The format is e4m3, `torch.float8_e4m3fn`. The scale of a row is its largest magnitude divided by
448.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import quantise_reference as reference
from . import reference as plain_reference
from ._linear import PORTABLE, Epilogue, Tiling, gated, launch_linear
from ._portable import has_portable, takes_columns
from ._support import (
    capability_of,
    check_columns,
    check_like,
    check_rows,
    check_vector,
    feeds_tensor_cores,
    hopper_multiprocessors,
    launch,
    native,
    rows_of,
    takes_pairs,
)

FP8 = reference.FP8
_MIN_CAPABILITY = (8, 9)
_ALIGNMENT = 16  # elements; the width of a row is a multiple of this


class QuantisedRows(NamedTuple):
    """Quantised numbers [R, D], with a factor for each row.

    Attributes:
        values: fp8, contiguous.
        scales: [R] fp32.
        fixed_scale: [1] fp32, the scale of all rows, if it is given in advance.
    """

    values: Tensor
    scales: Tensor
    fixed_scale: Tensor | None = None


def has_quantise(x: Tensor) -> bool:
    """Whether the kernels support such rows: bf16 on a card of compute capability 8.9 or later.

    Their width must be a multiple of 16, and rows must start on 16 bytes.
    """
    if native is None or not x.is_cuda or capability_of(x.device.index) < _MIN_CAPABILITY:
        return False
    return (
        x.dtype == torch.bfloat16
        and x.stride(-1) == 1
        and x.shape[-1] % _ALIGNMENT == 0
        and x.shape[-1] <= int(native.MAX_QUANTISED_COLUMNS)
        and x.stride(0) % (_ALIGNMENT // 2) == 0
        and x.data_ptr() % _ALIGNMENT == 0
    )


def quantise_rows(x: Tensor, out: QuantisedRows) -> None:
    """Quantise x to fp8.

    Args:
        x: [R, D] bf16, fp16 or fp32; rows may be strided.
        out: the quantised rows, written. With its `fixed_scale`, larger numbers are clipped to the
            largest one.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    _check("quantise_rows", x, out, x.shape[-1])
    if has_quantise(x):
        _quantise(x, out)
    else:
        reference.quantise_rows(x, out.values, out.scales, out.fixed_scale)


def rms_norm_quantised(x: Tensor, weight: Tensor, eps: float, out: QuantisedRows) -> None:
    """Apply `rms_norm` to rows [R, D], then `quantise_rows`, in one pass.

    The normalised rows are rounded to their dtype before they are quantised.

    Raises:
        ValueError: A shape, dtype or stride is not as for these operations.
    """
    _check("rms_norm_quantised", x, out, x.shape[-1])
    check_vector("rms_norm_quantised", "weight", weight, (x.dtype,), x.shape[1:], x.device)
    if has_quantise(x) and weight.data_ptr() % _ALIGNMENT == 0:
        _quantise(x, out, weight=weight, eps=eps)
        return
    normed = plain_reference.rms_norm(x, weight, eps)
    reference.quantise_rows(normed, out.values, out.scales, out.fixed_scale)


def silu_mul_quantised(
    gate_up: Tensor,
    out: QuantisedRows,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
) -> None:
    """Compute silu(gate) * up, each rounded to the rows' dtype, then `quantise_rows`; in one pass.

    Args:
        gate_up: [R, 2M], the gate's columns first; rows may be strided.
        out: the quantised rows [R, M], written.
        row_scales, column_scales: [R] and [2M] fp32, scales of a product of fp8 numbers that are
            not applied yet; both or neither.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    op = "silu_mul_quantised"
    _check(op, gate_up, out, gate_up.shape[-1] // 2)
    if row_scales is not None and column_scales is not None:
        _check_scales(op, gate_up, row_scales, column_scales)
    elif row_scales is not None or column_scales is not None:
        raise ValueError(f"{op}: wanted row_scales and column_scales, or neither; got one of them")
    if has_quantise(gate_up[:, : gate_up.shape[1] // 2]) and _are_aligned(column_scales):
        _quantise(gate_up, out, row_scales=row_scales, column_scales=column_scales, is_gated=True)
        return
    product = gate_up
    if row_scales is not None and column_scales is not None:
        product = reference.rescaled(gate_up, row_scales, column_scales).to(gate_up.dtype)
    activated = plain_reference.silu_mul(product)
    reference.quantise_rows(activated, out.values, out.scales, out.fixed_scale)


def rescale(
    product: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    adds: bool = False,
) -> None:
    """Multiply a product of fp8 numbers by its scales, and add the bias; in fp32, rounded once.

    Args:
        product: [R, N] bf16, fp16 or fp32; rows may be strided.
        row_scales, column_scales: [R] and [N] fp32.
        out: like `product`, and may be the same tensor; written.
        bias: [N], of the dtype of the product.
        adds: whether the result is added to `out`.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    op = "rescale"
    check_rows(op, "product", product, (2,))
    _check_scales(op, product, row_scales, column_scales)
    check_like(op, "out", out, product, tuple(product.shape))
    if bias is not None:
        check_vector(op, "bias", bias, (product.dtype,), product.shape[1:], product.device)
    if not (has_quantise(product) and has_quantise(out) and _are_aligned(column_scales, bias)):
        result = reference.rescaled(product, row_scales, column_scales)
        result = result if bias is None else result + bias
        out.copy_(result + out.float() if adds else result)
        return
    assert native is not None
    launch(
        native.scale,
        product,
        product=rows_of(product),
        row_scales=row_scales.data_ptr(),
        column_scales=column_scales.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        out=rows_of(out),
        adds=adds,
        num_rows=len(product),
        num_columns=product.shape[1],
    )


def fused_linear_fp8(
    x: QuantisedRows,
    weight: Tensor,
    scales: Tensor,
    out: Tensor,
    *,
    tiling: Tiling | None = None,
    bias: Tensor | None = None,
    epilogue: Epilogue = Epilogue.STORE,
    early: bool = False,
    ahead: Tensor | None = None,
) -> None:
    """Compute `fused_linear` with fp8 rows and an fp8 weight; sums are multiplied by the scales.

    Args:
        x: rows [R, D].
        weight: [N, D] fp8; rows may be strided.
        scales: [N] fp32, of the weight's rows.
        out: [R, N], or [R, N / 2] for SILU_MUL; the model dtype, written.
        tiling: tiling of the kernel. Its columns must divide N (except for tiles of rows), and its
            split times 128 must divide the depth. Without one, or if there is no kernel for the
            tensors, PyTorch computes the product.
        bias: [N], of the dtype of `out`; not with SILU_MUL.
        epilogue, early, ahead: as for `fused_linear`.

    Raises:
        ValueError: A shape or dtype is not as above.
        RuntimeError: There is no kernel for the tiling, or it does not divide the shape.
    """
    num_columns = out.shape[1] * (2 if epilogue is Epilogue.SILU_MUL else 1)
    _check_linear("fused_linear_fp8", x, weight, scales, out, num_columns)
    if bias is not None and epilogue is Epilogue.SILU_MUL:
        raise ValueError("fused_linear_fp8: SILU_MUL takes no bias, got one")
    if bias is not None:
        check_vector("fused_linear_fp8", "bias", bias, (out.dtype,), (num_columns,), out.device)
    is_tiled = tiling is not None and tiling.rows > 0  # Tiles of rows write eight elements at once.
    if tiling == PORTABLE:
        has_kernel = out.dtype == torch.bfloat16 and has_portable(x.values, weight)
        has_kernel = has_kernel and takes_columns(weight, out) and _are_aligned(scales, bias)
    else:
        has_kernel = tiling is not None and _has_linear(x, weight, scales, out)
        has_kernel = has_kernel and (not is_tiled or feeds_tensor_cores(out))
    if tiling is None or not has_kernel:
        _linear(x, weight, scales, out, bias, epilogue)
        return
    both = x.scales, scales
    launch_linear(
        x.values, weight, out, tiling, bias, epilogue, early=early, ahead=ahead, scales=both
    )


def add_linear_fp8(x: QuantisedRows, weight: Tensor, scales: Tensor, out: Tensor) -> None:
    """Add x W^T of many fp8 rows to out; sums are multiplied by the scales and rounded once.

    It runs in cuBLAS on a card of compute capability 9.0 (see `has_add_linear_fp8`), else in
    PyTorch.

    Args:
        x: rows [R, D].
        weight: [N, D] fp8; rows may be strided.
        scales: [N] fp32, of the weight's rows.
        out: [R, N], the model dtype, written.

    Raises:
        ValueError: A shape or dtype is not as above.
        RuntimeError: cuBLAS has no such product of this shape.
    """
    _check_linear("add_linear_fp8", x, weight, scales, out, out.shape[1])
    if has_add_linear_fp8(x, weight, scales, out):
        assert native is not None
        launch(
            native.add_linear,
            out,
            x=x.values.data_ptr(),
            weight=weight.data_ptr(),
            x_scales=x.scales.data_ptr(),
            weight_scales=scales.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.values.stride(0),
            weight_stride=weight.stride(0),
            out_stride=out.stride(0),
            num_rows=len(out),
            num_columns=len(weight),
            depth=weight.shape[1],
        )
        return
    _linear(x, weight, scales, out, None, Epilogue.RESIDUAL)


def has_add_linear_fp8(x: QuantisedRows, weight: Tensor, scales: Tensor, out: Tensor) -> bool:
    """Whether cuBLAS supports these tensors for `add_linear_fp8`.

    It does if `out` is bf16 on a card of compute capability 9.0, all rows start on 16 bytes, and
    PyTorch has loaded the library of CUDA 12.9 or later.
    """
    is_there = native is not None and bool(native.HAS_ADD_LINEAR)
    return is_there and _has_linear(x, weight, scales, out) and feeds_tensor_cores(out)


def _check_linear(
    op: str, x: QuantisedRows, weight: Tensor, scales: Tensor, out: Tensor, num_columns: int
) -> None:
    fits = weight.dtype == FP8 and weight.shape == (num_columns, x.values.shape[1])
    if not fits or scales.shape != (num_columns,) or len(out) != len(x.values):
        raise ValueError(
            f"{op}: wanted rows [R, D], a weight [{num_columns}, D] and {num_columns} "
            f"scales for out {list(out.shape)}, got {list(x.values.shape)}, {weight.dtype} "
            f"{list(weight.shape)} and {list(scales.shape)}"
        )
    check_columns(op, "weight", weight)
    check_vector(op, "x.values", x.values, (FP8,), tuple(x.values.shape), out.device)
    check_vector(op, "x.scales", x.scales, (torch.float32,), (len(out),), out.device)
    check_vector(op, "scales", scales, (torch.float32,), (num_columns,), out.device)
    if weight.device != out.device:
        raise ValueError(f"{op}: weight must be on {out.device}, got {weight.device}")


def _are_aligned(*vectors: Tensor | None) -> bool:
    """Whether kernels can read these tensors in vectors of 16 bytes."""
    return all(vector is None or vector.data_ptr() % 16 == 0 for vector in vectors)


def _linear(
    x: QuantisedRows,
    weight: Tensor,
    scales: Tensor,
    out: Tensor,
    bias: Tensor | None,
    epilogue: Epilogue,
) -> None:
    """Compute `fused_linear_fp8` in PyTorch."""
    product = reference.rescaled(reference.fp8_linear(x.values, weight), x.scales, scales)
    if epilogue is Epilogue.SILU_MUL:
        out.copy_(gated(product.to(out.dtype)))
        return
    product = product if bias is None else product + bias
    out.copy_(out.float() + product if epilogue is Epilogue.RESIDUAL else product)


def _has_linear(x: QuantisedRows, weight: Tensor, scales: Tensor, out: Tensor) -> bool:
    """Whether the kernel can read these tensors, and write rows with the strides of `out`."""
    if len(out) == 0 or native is None or not out.is_cuda or out.dtype != torch.bfloat16:
        return False
    matrices = (x.values, weight)
    return (
        hopper_multiprocessors(out.device.index) > 0
        and all(m.stride(1) == 1 and m.stride(0) % _ALIGNMENT == 0 for m in matrices)
        and all(m.data_ptr() % _ALIGNMENT == 0 for m in (*matrices, scales))
        and takes_pairs(out)
    )


def _quantise(
    x: Tensor,
    out: QuantisedRows,
    *,
    weight: Tensor | None = None,
    eps: float = 0.0,
    row_scales: Tensor | None = None,
    column_scales: Tensor | None = None,
    is_gated: bool = False,
) -> None:
    assert native is not None

    def address(tensor: Tensor | None) -> int:
        return 0 if tensor is None else tensor.data_ptr()

    launch(
        native.quantise,
        x,
        x=rows_of(x),
        weight=address(weight),
        eps=eps,
        row_scales=address(row_scales),
        column_scales=address(column_scales),
        fixed_scale=address(out.fixed_scale),
        out=out.values.data_ptr(),
        scales=out.scales.data_ptr(),
        is_gated=is_gated,
        num_rows=len(x),
        num_columns=out.values.shape[1],
    )


def _check(op: str, x: Tensor, out: QuantisedRows, width: int) -> None:
    check_rows(op, "x", x, (2,))
    check_vector(op, "out.values", out.values, (FP8,), (len(x), width), x.device)
    check_vector(op, "out.scales", out.scales, (torch.float32,), (len(x),), x.device)
    if out.fixed_scale is not None:
        check_vector(op, "out.fixed_scale", out.fixed_scale, (torch.float32,), (1,), x.device)


def _check_scales(op: str, product: Tensor, row_scales: Tensor, column_scales: Tensor) -> None:
    for name, scales, size in (
        ("row_scales", row_scales, product.shape[0]),
        ("column_scales", column_scales, product.shape[1]),
    ):
        check_vector(op, name, scales, (torch.float32,), (size,), product.device)

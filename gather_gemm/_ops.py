# SPDX-License-Identifier: Apache-2.0
"""Public operations: they check the arguments, then launch a kernel or run the reference."""

import torch
from torch import Tensor

from . import reference
from ._triton import can_take, guard, load_kernels
from .launch import choose_config

_kernels = load_kernels("kernel")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_built() -> bool:
    """Whether Triton is installed; without it CUDA tensors run the reference."""
    return _kernels is not None


def gather_gemm(
    x: Tensor, rows: Tensor | None, weight: Tensor, out: Tensor | None = None
) -> Tensor:
    """Multiply some rows by a transposed weight, without storing the gathered rows.

    Sums are fp32. On CUDA the Triton kernel runs if Triton is installed. On a CPU it runs under
    Triton's interpreter (``TRITON_INTERPRET=1``, fp32 and fp16). Otherwise the reference runs.

    Args:
        x: [T, D] bf16, fp16 or fp32; rows may be strided, D is contiguous.
        rows: int64 [R], each in [0, T); in any order, repeats allowed. Not checked, because the
            host would wait for values on a GPU. None takes all rows in order.
        weight: [N, D] of the same dtype; rows may be strided, D is contiguous.
        out: [R, N] of the same dtype; rows may be strided. Allocated when not given.

    Returns:
        ``x[rows] @ weight.T``, [R, N].

    Raises:
        ValueError: A shape, dtype, device or stride is not as above.
    """
    op = "gather_gemm"
    _check(op, "x", x, x, (-1, -1))
    _check(op, "weight", weight, x, (-1, x.shape[1]))
    num_rows = _num_rows(op, x, rows)
    shape = (num_rows, len(weight))
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    _check(op, "out", out, x, shape)
    if 0 in shape:
        return out
    if _kernels is None or not can_take(x):
        return reference.gather_gemm(x, rows, weight, out)
    config = choose_config(num_rows, x.element_size())
    with guard(x):
        _kernels.launch(x, None if rows is None else rows.contiguous(), weight, out, config)
    return out


def _num_rows(op: str, x: Tensor, rows: Tensor | None) -> int:
    """Check the shape of `rows` and return R."""
    if rows is None:
        return len(x)
    if rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != x.device:
        raise ValueError(
            f"{op}: rows must be int64 [R] on {x.device}, "
            f"got {rows.dtype} {list(rows.shape)} on {rows.device}"
        )
    return len(rows)


def _check(op: str, argument: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    fits = tensor.dim() == len(shape) and all(
        wanted in (-1, given) for wanted, given in zip(shape, tensor.shape, strict=True)
    )
    is_like = (
        tensor.dtype in _DTYPES and tensor.dtype == like.dtype and tensor.device == like.device
    )
    if not (fits and is_like):
        wanted_shape = ["any" if size == -1 else size for size in shape]
        raise ValueError(
            f"{op}: {argument} must be {wanted_shape} of one of bf16, fp16 and fp32, the "
            f"same for all, on {like.device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{op}: the columns of {argument} must be contiguous, got strides {tensor.stride()}"
        )


def _check_exact(
    op: str,
    argument: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    like: Tensor,
    dtype: torch.dtype | None = None,
    *,
    rows_apart: bool = False,
) -> None:
    """Check shape, device and dtype (by default those of `like`), and contiguity.

    With `rows_apart` only each row has to be contiguous.
    """
    dtype = dtype or like.dtype
    is_like = tensor.dtype == dtype and tensor.device == like.device
    is_contiguous = tensor.is_contiguous() or (
        rows_apart and tensor.dim() > 1 and tensor[0].is_contiguous()
    )
    if tensor.shape != shape or not is_like or not is_contiguous:
        raise ValueError(
            f"{op}: {argument} must be {str(dtype).removeprefix('torch.')} {list(shape)} "
            f"{'with contiguous rows' if rows_apart else 'contiguous'} on {like.device}, got "
            f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )

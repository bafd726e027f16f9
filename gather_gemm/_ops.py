# SPDX-License-Identifier: Apache-2.0
"""The public operations: check the arguments, then launch a kernel or run the reference."""

import warnings
from contextlib import nullcontext
from types import ModuleType

import torch
from torch import Tensor

from . import reference
from .launch import choose_config, is_kernel_faster

_kernel: ModuleType | None
try:
    from . import kernel as _kernel
except ModuleNotFoundError:  # no Triton
    _kernel = None
except (ImportError, RuntimeError) as error:
    warnings.warn(f"gather_gemm: Triton does not load: {error}", stacklevel=2)
    _kernel = None

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def is_built() -> bool:
    """Whether Triton is there; without it CUDA tensors run the reference."""
    return _kernel is not None


def gather_gemm(x: Tensor, rows: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Product of gathered rows and a transposed weight, without storing the gathered rows.

    Sums in fp32. On CUDA the Triton kernel where Triton is installed and the kernel was measured
    faster, and on CPU under Triton's interpreter (``TRITON_INTERPRET=1``, fp32 and fp16); else the
    reference.

    Args:
        x: [T, D] bf16, fp16 or fp32; rows may be strided, D is contiguous.
        rows: int64 [R], each in [0, T); in any order, repeats allowed. Not checked: looking at
            values on a GPU would make the host wait for it.
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
    if rows.dim() != 1 or rows.dtype != torch.int64 or rows.device != x.device:
        raise ValueError(
            f"{op}: rows must be int64 [R] on {x.device}, "
            f"got {rows.dtype} {list(rows.shape)} on {rows.device}"
        )
    shape = (len(rows), len(weight))
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    _check(op, "out", out, x, shape)
    if 0 in shape:
        return out
    is_slower = x.is_cuda and not is_kernel_faster(len(rows), x.element_size())
    if _kernel is None or not _has_kernel(x) or is_slower:
        return reference.gather_gemm(x, rows, weight, out)
    config = choose_config(len(rows), x.element_size())
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _kernel.launch(x, rows.contiguous(), weight, out, config)
    return out


def _has_kernel(x: Tensor) -> bool:
    if _is_interpreted():
        # The interpreter's dot product takes the bit patterns of bf16 for integers.
        return x.dtype != torch.bfloat16
    return x.is_cuda


def _is_interpreted() -> bool:
    """Whether the kernel was decorated under TRITON_INTERPRET=1."""
    assert _kernel is not None
    return type(_kernel.gather_gemm_kernel).__name__ == "InterpretedFunction"


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

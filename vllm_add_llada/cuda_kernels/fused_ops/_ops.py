# SPDX-License-Identifier: Apache-2.0
"""The public operations: check the arguments, then launch the kernel or run the reference."""

import warnings
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import reference

_native: ModuleType | None
try:
    _native = import_module("._fused_ops", __package__)
except ModuleNotFoundError:
    _native = None
except ImportError as error:
    warnings.warn(f"fused_ops: the compiled module does not load: {error}", stacklevel=2)
    _native = None

_KERNEL_DTYPES = {
    torch.float32: "FLOAT32",
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
}


def is_built() -> bool:
    """Whether the compiled module is there; without it CUDA tensors run the reference."""
    return _native is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm (Zhang, Sennrich, arXiv:1910.07467) of each row.

    Statistics in fp32; the normalised row is cast to the model dtype and only then multiplied by
    the weight, as in the public code of LLaDA and Dream.

    Args:
        x: [R, D] or [R, H, D] bf16, fp16 or fp32; leading strides are free, D is contiguous.
        weight: [D] of the same dtype.
        eps: Added to the mean square.
        out: Like ``x``; may be ``x``. Allocated when not given.

    Returns:
        ``out``.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    name = "rms_norm"
    _check_rows(name, "x", x, (2, 3))
    _check_like(name, "weight", weight, x, x.shape[-1:])
    if out is not None:
        _check_like(name, "out", out, x, x.shape)
    if not _has_kernel(x):
        return reference.rms_norm(x, weight, eps, out)
    assert _native is not None
    out = torch.empty_like(x) if out is None else out
    _launch(_native.rms_norm, x, **_norm_arguments(x, weight, out, eps))
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """``residual += x`` in place, then `rms_norm` of the sum as the model dtype holds it.

    Args:
        x: As for `rms_norm`.
        residual: Like ``x``; updated in place.
        weight, eps: As for `rms_norm`.
        out: Like ``x``; may be ``x`` but not ``residual``. Allocated when not given.

    Returns:
        ``out``, the normalised rows.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    name = "add_rms_norm"
    _check_rows(name, "x", x, (2, 3))
    _check_like(name, "residual", residual, x, x.shape)
    _check_like(name, "weight", weight, x, x.shape[-1:])
    if out is not None:
        _check_like(name, "out", out, x, x.shape)
        if out.data_ptr() == residual.data_ptr() and out.numel() > 0:
            raise ValueError("add_rms_norm: out must not be residual, which holds the sum")
    if not _has_kernel(x):
        return reference.add_rms_norm(x, residual, weight, eps, out)
    assert _native is not None
    out = torch.empty_like(x) if out is None else out
    arguments = _norm_arguments(x, weight, out, eps)
    _launch(_native.add_rms_norm, x, residual=_rows(residual), **arguments)
    return out


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding (Su et al., arXiv:2104.09864), half-split form, of q and k in place.

    ``u' = u * cos + concat(-u[rd/2:], u[:rd/2]) * sin`` on the first rd channels of every head; the
    others stay. With fp32 tables the arithmetic is fp32 and the result rounded once (LLaDA);
    with tables in the model dtype every product and the sum are rounded to it (Dream).

    Args:
        q: [T, H, hd] bf16, fp16 or fp32; leading strides are free, hd is contiguous.
        k: [T, KV, hd], likewise.
        cos: [T, rd], rd even and at most hd, fp32 or the dtype of q; rows may be strided.
        sin: Like ``cos``.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    name = "apply_rotary"
    _check_rows(name, "q", q, (3,))
    _check_like(name, "k", k, q, (q.shape[0], k.shape[1] if k.dim() == 3 else -1, q.shape[2]))
    _check_rows(name, "cos", cos, (2,))
    _check_like(name, "sin", sin, cos, cos.shape)
    if cos.dtype not in (torch.float32, q.dtype) or cos.device != q.device:
        raise ValueError(
            f"{name}: cos must be float32 or {q.dtype} on {q.device}, "
            f"got {cos.dtype} on {cos.device}"
        )
    rotary_dim = cos.shape[1]
    if len(cos) != len(q) or rotary_dim % 2 or rotary_dim > q.shape[2]:
        raise ValueError(
            f"{name}: cos must be [{len(q)}, even and at most {q.shape[2]}], got {list(cos.shape)}"
        )
    if not _has_kernel(q):
        reference.apply_rotary(q, k, cos, sin)
        return
    assert _native is not None
    _launch(
        _native.apply_rotary,
        q,
        q=_rows(q),
        k=_rows(k),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        cos_stride=cos.stride(0),
        sin_stride=sin.stride(0),
        dtype=_dtype(q),
        table_dtype=_dtype(cos),
        num_tokens=len(q),
        rotary_dim=rotary_dim,
    )


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Gate of a gated MLP ("SwiGLU", Shazeer, arXiv:2002.05202): ``silu(gate) * up``.

    silu is rounded to the model dtype before the product, as separate operations would.

    Args:
        gate_up: [R, 2M] bf16, fp16 or fp32, gate first; rows may be strided.
        out: [R, M]; may be either half of ``gate_up``. Allocated when not given.

    Returns:
        ``out``.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    name = "silu_mul"
    _check_rows(name, "gate_up", gate_up, (2,))
    if gate_up.shape[1] % 2:
        raise ValueError(f"{name}: gate_up must be [R, 2M], got {list(gate_up.shape)}")
    gate, up = gate_up.chunk(2, dim=-1)
    if out is not None:
        _check_like(name, "out", out, gate, gate.shape)
    if not _has_kernel(gate_up):
        return reference.silu_mul(gate_up, out)
    assert _native is not None
    out = torch.empty_like(gate, memory_format=torch.contiguous_format) if out is None else out
    _launch(
        _native.silu_mul,
        gate,
        gate=_rows(gate),
        up=_rows(up),
        out=_rows(out),
        dtype=_dtype(gate),
        num_rows=len(gate),
        num_columns=gate.shape[1],
    )
    return out


def _norm_arguments(x: Tensor, weight: Tensor, out: Tensor, eps: float) -> dict[str, Any]:
    return {
        "x": _rows(x),
        "weight": weight.data_ptr(),
        "out": _rows(out),
        "dtype": _dtype(x),
        "num_rows": x.shape[:-1].numel(),
        "num_columns": x.shape[-1],
        "eps": eps,
    }


def _launch(function: Callable[..., None], tensor: Tensor, **arguments: Any) -> None:
    """Run a launch on the device of ``tensor`` and its current stream."""
    with torch.cuda.device(tensor.device):
        stream = torch.cuda.current_stream().cuda_stream
        function(**arguments, device=torch.cuda.current_device(), stream=stream)


def _rows(tensor: Tensor) -> tuple[int, int, int, int]:
    """A tensor [R, D] or [R, H, D] as the kernels see it: address, H, strides of R and H."""
    if tensor.dim() == 2:
        return tensor.data_ptr(), 1, tensor.stride(0), 0
    return tensor.data_ptr(), tensor.shape[1], tensor.stride(0), tensor.stride(1)


def _dtype(tensor: Tensor) -> int:
    return int(getattr(_native, _KERNEL_DTYPES[tensor.dtype]))


def _has_kernel(tensor: Tensor) -> bool:
    return _native is not None and tensor.is_cuda


def _check_rows(name: str, argument: str, tensor: Tensor, dims: tuple[int, ...]) -> None:
    if tensor.dim() not in dims or tensor.dtype not in _KERNEL_DTYPES:
        wanted = " or ".join(f"{dim}-D" for dim in dims)
        raise ValueError(
            f"{name}: {argument} must be {wanted} bf16, fp16 or fp32, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )
    if not 1 <= tensor.shape[-1] < 2**31:
        raise ValueError(f"{name}: {argument} must have columns, got {list(tensor.shape)}")
    _check_columns(name, argument, tensor)


def _check_like(
    name: str, argument: str, tensor: Tensor, like: Tensor, shape: tuple[int, ...]
) -> None:
    same_place = tensor.dtype == like.dtype and tensor.device == like.device
    if tuple(tensor.shape) != tuple(shape) or not same_place:
        raise ValueError(
            f"{name}: {argument} must be {like.dtype} {list(shape)} on {like.device}, "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
    _check_columns(name, argument, tensor)


def _check_columns(name: str, argument: str, tensor: Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: the last dimension of {argument} must be contiguous, "
            f"got strides {tensor.stride()}"
        )

# SPDX-License-Identifier: Apache-2.0
"""Row-wise operations: they check the arguments, then launch the kernel or run the reference."""

from typing import Any

import torch
from torch import Tensor

from . import reference
from ._fp8_heads import NO_COPIES, Fp8Heads, made_in_launch, places_of, quantise_heads
from ._support import (
    NO_INTEGERS,
    NO_ROWS,
    check_like,
    check_rows,
    check_vector,
    dtype_of,
    has_kernel,
    integers_of,
    launch,
    native,
    rows_of,
)
from .reference import Kept


def is_built() -> bool:
    """Whether the compiled module is available; without it CUDA tensors run the reference."""
    return native is not None


def build_stamp() -> int | None:
    """Return the stamp of the sources that the compiled module was built from, if it has one."""
    return getattr(native, "BUILD_STAMP", None)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Apply RMSNorm (Zhang, Sennrich, arXiv:1910.07467) to each row.

    Statistics are fp32. The normalised row is cast to the model dtype before it is multiplied by
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
    check_rows(name, "x", x, (2, 3))
    check_like(name, "weight", weight, x, x.shape[-1:])
    if out is not None:
        check_like(name, "out", out, x, x.shape)
    if not has_kernel(x):
        return reference.rms_norm(x, weight, eps, out)
    assert native is not None
    out = torch.empty_like(x) if out is None else out
    launch(
        native.rms_norm,
        x,
        x=rows_of(x),
        weight=weight.data_ptr(),
        out=rows_of(out),
        dtype=dtype_of(x),
        num_rows=x.shape[:-1].numel(),
        num_columns=x.shape[-1],
        eps=eps,
    )
    return out


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write the tables of `apply_rotary`: cos and sin of the angles, each repeated in both halves.

    An angle is position * inverse frequency. The position and the angle are rounded to fp32, and so
    are cos and sin before they are cast.

    Args:
        positions: [T] int32 or int64.
        inverse_frequencies: [rd/2] fp32, radians per position.
        cos: [T, rd] bf16, fp16 or fp32, rd even; rows may be strided; written.
        sin: Like ``cos``.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    name, device = "rotary_tables", positions.device
    check_vector(name, "positions", positions, (torch.int32, torch.int64), (-1,), device)
    check_rows(name, "cos", cos, (2,))
    num_rows, rotary_dim = cos.shape
    if num_rows != len(positions) or rotary_dim % 2 or cos.device != device:
        raise ValueError(
            f"{name}: cos must be [{len(positions)}, even] on {device}, "
            f"got {list(cos.shape)} on {cos.device}"
        )
    check_like(name, "sin", sin, cos, cos.shape)
    wanted = (rotary_dim // 2,)
    check_vector(name, "inverse_frequencies", inverse_frequencies, (torch.float32,), wanted, device)
    if not has_kernel(positions):
        reference.rotary_tables(positions, inverse_frequencies, cos, sin)
        return
    assert native is not None
    launch(
        native.rotary_tables,
        positions,
        positions=integers_of(positions),
        inverse_frequencies=inverse_frequencies.data_ptr(),
        cos=rows_of(cos),
        sin=rows_of(sin),
        dtype=dtype_of(cos),
        num_rows=num_rows,
        rotary_dim=rotary_dim,
    )


def apply_rotary(
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kept: Kept | None = None,
    fp8: Fp8Heads | None = None,
) -> None:
    """Apply the rotary embedding (Su et al., arXiv:2104.09864), half-split form, in place.

    ``u' = u * cos + concat(-u[rd/2:], u[:rd/2]) * sin`` on the first rd channels of every head; the
    other channels are unchanged. With fp32 tables the arithmetic is fp32 and the result is rounded
    once (LLaDA). With tables in the model dtype every product and the sum are rounded to it
    (Dream).

    Args:
        q: [T, H, hd] bf16, fp16 or fp32; leading strides are free, hd is contiguous. Either of q
            and k may be absent.
        k: [T, KV, hd], with the same strides allowed.
        cos: [T, rd], rd even and at most hd, fp32 or the dtype of q; rows may be strided.
        sin: Like ``cos``.
        kept: Caches in which the rotated keys and the values are also stored, as by
            `store_keys_values`; in the same launch if rd = hd.
        fp8: Copies of the rotated heads and of the values in fp8; in the same launch if rd = hd
            and the tensors are bf16 rows that start on 16 bytes.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    name = "apply_rotary"
    q, k = _present(q, k)
    _check_rotary(name, q, k, cos, sin)
    _check_kept(name, k, kept)
    in_launch = None if fp8 is None else made_in_launch(name, q, k, cos, fp8)
    if has_kernel(q):
        assert native is not None
        launch(native.apply_rotary, q, **_rotary_arguments(q, k, cos, sin, kept, in_launch))
    else:
        reference.apply_rotary(q, k, cos, sin, kept)
    if fp8 is not None and in_launch is None:
        quantise_heads(q, k, fp8)


def norm_rotary(
    q: Tensor | None,
    k: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kept: Kept | None = None,
    fp8: Fp8Heads | None = None,
) -> None:
    """Apply `rms_norm` to every head of q and k, then `apply_rotary`, in place, in one pass.

    The results are rounded as by the two separate operations.

    Args:
        q, k, cos, sin, kept, fp8: As for `apply_rotary`; `kept` is in the same launch for any rd.
        q_weight: [hd] of the dtype of q, the gains of every head of q.
        k_weight: [hd] of the dtype of q, the gains of every head of k.
        eps: Added to the mean square of a head.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    name = "norm_rotary"
    q, k = _present(q, k)
    _check_rotary(name, q, k, cos, sin)
    check_like(name, "q_weight", q_weight, q, q.shape[-1:])
    check_like(name, "k_weight", k_weight, q, q.shape[-1:])
    _check_kept(name, k, kept)
    in_launch = None if fp8 is None else made_in_launch(name, q, k, cos, fp8)
    if has_kernel(q):
        assert native is not None
        launch(
            native.norm_rotary,
            q,
            q_weight=q_weight.data_ptr(),
            k_weight=k_weight.data_ptr(),
            eps=eps,
            **_rotary_arguments(q, k, cos, sin, kept, in_launch),
        )
    else:
        reference.norm_rotary(q, k, q_weight, k_weight, eps, cos, sin, kept)
    if fp8 is not None and in_launch is None:
        quantise_heads(q, k, fp8)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute the gate of a gated MLP ("SwiGLU", Shazeer, arXiv:2002.05202): ``silu(gate) * up``.

    silu is rounded to the model dtype before the product, as by separate operations.

    Args:
        gate_up: [R, 2M] bf16, fp16 or fp32, gate first; rows may be strided.
        out: [R, M]; may be either half of ``gate_up``. Allocated when not given.

    Returns:
        ``out``.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    name = "silu_mul"
    check_rows(name, "gate_up", gate_up, (2,))
    if gate_up.shape[1] % 2:
        raise ValueError(f"{name}: gate_up must be [R, 2M], got {list(gate_up.shape)}")
    gate, up = gate_up.chunk(2, dim=-1)
    if out is not None:
        check_like(name, "out", out, gate, gate.shape)
    if not has_kernel(gate_up):
        return reference.silu_mul(gate_up, out)
    assert native is not None
    out = torch.empty_like(gate, memory_format=torch.contiguous_format) if out is None else out
    launch(
        native.silu_mul,
        gate,
        gate=rows_of(gate),
        up=rows_of(up),
        out=rows_of(out),
        dtype=dtype_of(gate),
        num_rows=len(gate),
        num_columns=gate.shape[1],
    )
    return out


def store_keys_values(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """Set ``k_cache[slots[r]] = k[r]``, and the same for v, for every row r, in one launch.

    Rows whose slot is not in 0..N-1 are skipped; -1 marks padding. If two rows have the same slot,
    either may be stored.

    Args:
        k: [R, KV, hd] bf16, fp16 or fp32; leading strides are free, hd is contiguous.
        v: Like ``k``.
        k_cache: [N, KV, hd] of the same dtype, with the same strides allowed; written.
        v_cache: Like ``k_cache``.
        slots: [R] int32 or int64.

    Raises:
        ValueError: A shape, dtype or stride is not as above.
    """
    name = "store_keys_values"
    check_rows(name, "k", k, (3,))
    _check_caches(name, k, Kept(v, k_cache, v_cache, slots))
    check_vector(name, "slots", slots, (torch.int32, torch.int64), k.shape[:1], k.device)
    if not has_kernel(k):
        reference.store_keys_values(k, v, k_cache, v_cache, slots)
        return
    assert native is not None
    launch(
        native.store_keys_values,
        k,
        k=rows_of(k),
        v=rows_of(v),
        k_cache=rows_of(k_cache),
        v_cache=rows_of(v_cache),
        slots=integers_of(slots),
        dtype=dtype_of(k),
        num_rows=k.shape[0],
        num_slots=len(k_cache),
        head_dim=k.shape[2],
    )


def _present(q: Tensor | None, k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return queries and keys, with a tensor of no heads in place of an absent one."""
    present = k if q is None else q
    if present is None:
        raise ValueError("q, k: wanted at least one of them, got None for both")
    no_heads = present[:, :0]
    return no_heads if q is None else q, no_heads if k is None else k


def _check_caches(name: str, k: Tensor, kept: Kept) -> None:
    v, k_cache, v_cache, *_ = kept
    check_like(name, "v", v, k, k.shape)
    num_slots = k_cache.shape[0] if k_cache.dim() == 3 else -1
    check_like(name, "k_cache", k_cache, k, (num_slots, *k.shape[1:]))
    check_like(name, "v_cache", v_cache, k, k_cache.shape)


def _check_kept(name: str, k: Tensor, kept: Kept | None) -> None:
    if kept is None:
        return
    _check_caches(name, k, kept)
    check_vector(name, "slots", kept.slots, (torch.int32, torch.int64), (-1,), k.device)
    if len(kept.slots) > len(k):
        raise ValueError(f"{name}: slots must be at most [{len(k)}], got {list(kept.slots.shape)}")
    if kept.copies is not None:
        shape = -1, len(kept.slots)
        check_vector(name, "copies", kept.copies, (torch.int32, torch.int64), shape, k.device)


def _check_rotary(name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_rows(name, "q", q, (3,))
    check_like(name, "k", k, q, (q.shape[0], k.shape[1] if k.dim() == 3 else -1, q.shape[2]))
    check_rows(name, "cos", cos, (2,))
    check_like(name, "sin", sin, cos, cos.shape)
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


def _rotary_arguments(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kept: Kept | None, fp8: Fp8Heads | None
) -> dict[str, Any]:
    if kept is None:
        places = (NO_ROWS, NO_ROWS, NO_ROWS, NO_INTEGERS, 0, 0, NO_INTEGERS, 0)
    else:
        v, k_cache, v_cache, slots, copies = kept
        rows = (rows_of(v), rows_of(k_cache), rows_of(v_cache))
        more = (NO_INTEGERS, 0) if copies is None else (integers_of(copies), len(copies))
        places = (*rows, integers_of(slots), len(slots), len(k_cache), *more)
    return {
        "q": rows_of(q),
        "k": rows_of(k),
        "cos": cos.data_ptr(),
        "sin": sin.data_ptr(),
        "cos_stride": cos.stride(0),
        "sin_stride": sin.stride(0),
        "dtype": dtype_of(q),
        "table_dtype": dtype_of(cos),
        "num_tokens": len(q),
        "head_dim": q.shape[2],
        "rotary_dim": cos.shape[1],
        "kept": places,
        "fp8": NO_COPIES if fp8 is None else places_of(fp8),
    }

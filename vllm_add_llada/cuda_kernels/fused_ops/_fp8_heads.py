# SPDX-License-Identifier: Apache-2.0
"""fp8 copies of rotated heads and of values: their arguments, and the choice of who makes them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._support import NO_ROWS, check_like, check_vector, has_kernel, rows_of
from .quantise_reference import FP8, LARGEST

NO_COPIES = (NO_ROWS, NO_ROWS, NO_ROWS, NO_ROWS, 0, 0)


class Fp8Heads(NamedTuple):
    """Copies of heads as fp8 (e4m3): numbers divided by their scale, rounded, and clipped to 448.

    Attributes:
        q: [T, H, hd] fp8, written; leading strides are free, hd is contiguous. None: no copy.
        k: [T, KV, hd] fp8, written, with the same strides allowed: the keys minus `mean`.
        v: [T, KV, hd] fp8, written, with the same strides allowed: copies of `values`. Given if
            `k` is.
        values: [T, KV, hd], the values, with the same strides allowed.
        mean: [KV, hd] fp32.
        scales: [3 or more] fp32, powers of two; the first three belong to queries,
            keys and values.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    values: Tensor | None
    mean: Tensor
    scales: Tensor


def quantise_heads(q: Tensor, k: Tensor, fp8: Fp8Heads) -> None:
    """Copy rotated heads and values to fp8 in PyTorch."""
    parts = ((fp8.q, q), (fp8.k, k), (fp8.v, fp8.values))
    for (out, heads), scale in zip(parts, fp8.scales[:3], strict=True):
        if out is not None and heads is not None:
            wide = heads.float() - fp8.mean if heads is k else heads.float()
            out.copy_((wide / scale).clamp(-LARGEST, LARGEST))


def made_in_launch(name: str, q: Tensor, k: Tensor, cos: Tensor, fp8: Fp8Heads) -> Fp8Heads | None:
    """Check the copies; return them if the rotation's launch can make them, else None.

    The launch can make them if its threads cover all channels of all heads in whole vectors.
    """
    _check(name, q, k, fp8)
    is_bf16 = has_kernel(q) and q.dtype == torch.bfloat16
    if not is_bf16 or cos.shape[1] != q.shape[2]:
        return None
    lanes = q.shape[2] // 16
    wide = [x for x in (q, k, fp8.values) if x is not None and x.shape[1]]
    narrow = [x for x in (fp8.q, fp8.k, fp8.v) if x is not None and x.shape[1]]
    starts = [(x.data_ptr(), x.stride(0) * x.itemsize, x.stride(1) * x.itemsize) for x in wide]
    is_made = (
        q.shape[2] % 16 == 0
        and lanes & (lanes - 1) == 0
        and all(place % 16 == 0 for places in starts for place in places)
        and all(x.data_ptr() % 8 == 0 and x.stride(0) % 8 == x.stride(1) % 8 == 0 for x in narrow)
        and (cos.data_ptr() | cos.stride(0) * cos.itemsize) % 16 == 0
    )
    return fp8 if is_made else None


def places_of(fp8: Fp8Heads) -> tuple[Any, ...]:
    """Return the launch's arguments for the copies."""
    heads = (fp8.q, fp8.k, fp8.v, fp8.values)
    rows = tuple(NO_ROWS if x is None else rows_of(x) for x in heads)
    return (*rows, fp8.mean.data_ptr(), fp8.scales.data_ptr())


def _check(name: str, q: Tensor, k: Tensor, fp8: Fp8Heads) -> None:
    check_vector(name, "scales", fp8.scales, (torch.float32,), (-1,), q.device)
    if len(fp8.scales) < 3:
        raise ValueError(f"{name}: scales must have 3 numbers or more, got {len(fp8.scales)}")
    if len({x is None for x in (fp8.k, fp8.v, fp8.values)}) > 1:
        raise ValueError(f"{name}: wanted fp8.k, fp8.v and fp8.values, or none of them")
    if fp8.k is not None:
        check_vector(name, "mean", fp8.mean, (torch.float32,), k.shape[1:], q.device)
    for argument, out, heads in (("q", fp8.q, q), ("k", fp8.k, k), ("v", fp8.v, k)):
        if out is None:
            continue
        is_like = out.shape == heads.shape and out.device == heads.device
        if not is_like or out.dtype != FP8 or out.stride(-1) != 1:
            raise ValueError(
                f"{name}: fp8.{argument} must be float8_e4m3fn {list(heads.shape)} on "
                f"{heads.device}, got {out.dtype} {list(out.shape)} on {out.device}"
            )
    if fp8.values is not None:
        check_like(name, "fp8.values", fp8.values, k, k.shape)

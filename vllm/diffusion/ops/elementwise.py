# SPDX-License-Identifier: Apache-2.0
"""Element-wise ops of a layer, each in one pass over its rows.

`fused_ops` runs its CUDA kernel where it is built, and its PyTorch reference elsewhere; which one
is logged once per kind of device. Both round where the public modelling code of the models does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_add_llada.cuda_kernels import fused_ops
from vllm_add_llada.cuda_kernels.fused_ops import Kept, QuantisedRows

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | QuantisedRows | None = None
) -> Tensor | QuantisedRows:
    """Compute weight * cast(x / rms(x)): statistics in fp32, cast back, and only then the gain.

    Args:
        x: [..., D], model dtype.
        weight: [D], model dtype.
        eps: added to the mean square.
        out: in the shape of x, written; quantised at once if it has quantised rows; None allocates.

    Returns:
        the shape of x: `out`, or a new tensor.
    """
    if isinstance(out, QuantisedRows):
        fused_ops.rms_norm_quantised(x, weight, eps, out)
        return out
    return fused_ops.rms_norm(x, weight, eps, out)


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write cos and sin of position * inverse frequency in fp32, cast, twice side by side.

    Args:
        positions: [R] int32 or int64, contiguous.
        inverse_frequencies: [rd / 2] fp32, radians a position.
        cos, sin: [R, rd], model dtype or fp32, written.
    """
    fused_ops.rotary_tables(positions, inverse_frequencies, cos, sin)


def apply_rotary(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, kept: Kept | None = None
) -> None:
    """Rotate queries and keys in place, half-split pairing; either may be absent.

    Args:
        q: [R, H, hd], model dtype.
        k: [R, KV, hd], model dtype.
        cos, sin: [R, rd], rd <= hd even; fp32 tables rotate in fp32 and cast back, tables in the
            model dtype rotate in it. Channels from rd on stay as they are.
        kept: store for keys and values of some rows.
    """
    present = q if q is not None else k
    if present is None:
        return
    no_heads = present[:, :0]
    fused_ops.apply_rotary(
        q if q is not None else no_heads, k if k is not None else no_heads, cos, sin, kept
    )


def norm_rotary(
    q: Tensor | None,
    k: Tensor | None,
    weights: tuple[Tensor, Tensor],
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kept: Kept | None = None,
) -> None:
    """Apply `rms_norm` to every head of q and k, then `apply_rotary`, in place, in one pass.

    Args:
        q, k, cos, sin, kept: as for `apply_rotary`; either of q and k may be absent.
        weights: [hd] of the query heads and [hd] of the key heads, model dtype.
        eps: added to the mean square of a head.
    """
    present = q if q is not None else k
    if present is None:
        return
    no_heads = present[:, :0]
    fused_ops.norm_rotary(
        q if q is not None else no_heads,
        k if k is not None else no_heads,
        *weights,
        eps,
        cos,
        sin,
        kept,
    )


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute silu(gate) * up.

    Args:
        gate_up: [R, 2M], the gate's columns first, model dtype.
        out: [R, M], written; None allocates.

    Returns:
        [R, M]: `out`, or a new tensor.
    """
    return fused_ops.silu_mul(gate_up, out)


def store_keys_values(
    k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Copy rows of keys and values to cache rows.

    Args:
        k, v: [R, KV, hd], model dtype; rows may be strided.
        key_cache, value_cache: [N, KV, hd], model dtype, written; rows may be strided.
        slots: [R] int32 or int64, the cache row of each row; rows with a negative one are skipped.
    """
    fused_ops.store_keys_values(k, v, key_cache, value_cache, slots)

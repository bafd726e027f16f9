# SPDX-License-Identifier: Apache-2.0
"""PyTorch references of the fused operations; they define the results and their rounding.

"Model dtype" is the dtype of the activations. The rounding follows the public modelling code of
LLaDA (https://huggingface.co/GSAI-ML/LLaDA-8B-Instruct) and Dream
(https://huggingface.co/Dream-org/Dream-v0-Instruct-7B).
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Compute ``weight * cast(x32 * rsqrt(mean(x32^2) + eps))``; see `fused_ops.rms_norm`."""
    x32 = x.float()
    scale = torch.rsqrt(x32.pow(2).mean(dim=-1, keepdim=True) + eps)
    return _written(weight * (x32 * scale).to(x.dtype), out)


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write both halves of the tables of some positions; see `fused_ops.rotary_tables`."""
    angles = positions[:, None] * inverse_frequencies
    for function, table in ((torch.cos, cos), (torch.sin, sin)):
        table.unflatten(1, (2, -1)).copy_(function(angles)[:, None])


class Kept(NamedTuple):
    """Caches in which keys and values of the last S rows are also stored.

    Attributes:
        v: [T, KV, hd], the values of all rows; leading strides are free, hd is contiguous.
        k_cache, v_cache: [N, KV, hd], with the same strides allowed; written.
        slots: [S] int32 or int64, the cache row of each of these rows. A slot that is not in 0..N-1
            skips its row. If two rows have the same slot, either may be stored.
        copies: [C, S] int32 or int64, further cache rows of rows that have a slot; the first
            negative entry of a row ends them. None for no copies.
    """

    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    copies: Tensor | None = None


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kept: Kept | None = None) -> None:
    """Rotate q and k in place, half-split; see `fused_ops.apply_rotary`."""
    for heads in (q, k):
        rotated = heads[..., : cos.shape[-1]]
        # fp32 tables promote the product to fp32; tables in the model dtype keep it there.
        lower, upper = rotated.chunk(2, dim=-1)
        turned = torch.cat((-upper, lower), dim=-1)
        rotated.copy_(rotated * cos[:, None, :] + turned * sin[:, None, :])
    if kept is not None:
        v, k_cache, v_cache, slots, copies = kept
        rows = slice(len(k) - len(slots), None)
        for places in (slots, *(() if copies is None else copies)):
            store_keys_values(k[rows], v[rows], k_cache, v_cache, places)


def norm_rotary(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kept: Kept | None = None,
) -> None:
    """Apply `rms_norm` to the heads, then `apply_rotary`; see `fused_ops.norm_rotary`."""
    rms_norm(q, q_weight, eps, out=q)
    rms_norm(k, k_weight, eps, out=k)
    apply_rotary(q, k, cos, sin, kept)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute ``silu(gate) * up`` in the model dtype; see `fused_ops.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return _written(silu(gate) * up, out)


def store_keys_values(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    """Copy rows of k and v to the rows `slots` of the caches; see `fused_ops.store_keys_values`.

    In place of a skipped row, the first stored row is written again (or a row of the cache, if none
    is stored). So the host does not have to read which rows are skipped.
    """
    if len(slots) == 0 or len(k_cache) == 0:
        return
    kept = (slots >= 0) & (slots < len(k_cache))
    first = kept.int().argmax()[None]
    some_slot = slots[first].long().clamp(0, len(k_cache) - 1)
    places = torch.where(kept, slots.long(), some_slot)
    for source, cache in ((k, k_cache), (v, v_cache)):
        some_row = torch.where(kept[first][:, None, None], source[first], cache[some_slot])
        cache.index_copy_(0, places, torch.where(kept[:, None, None], source, some_row))


def _written(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)

# SPDX-License-Identifier: Apache-2.0
"""The keys-values stage and the attend stage of a layer.

Letters: R rows of a chunk, N rows of a key and value buffer, D hidden size, H and KV query and
key/value heads of this rank, hd head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion import ops
from vllm.diffusion.layers.attention_backends import AttentionLayout, Span, attend
from vllm.diffusion.layers.norm import AllHeadsRMSNorm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

__all__ = ["AttentionLayout", "KeySource", "SelfAttention", "Span"]


class KeySource(NamedTuple):
    """Rows of a chunk, and the keys and values that they read.

    Attributes:
        rows: of the chunk.
        k, v: [N, KV, hd].
        layout: which of them each sequence reads; its queries count from the first of `rows`.
    """

    rows: slice
    k: Tensor
    v: Tensor
    layout: AttentionLayout


@dataclass(frozen=True)
class SelfAttention:
    """The keys-values stage and the attend stage of one layer, over weights owned elsewhere.

    `q_norm` and `k_norm` are of one kind, and there both or not at all: `RMSNorm` for a model that
    norms each head [hd], `AllHeadsRMSNorm` for one that norms all heads together. `clip` bounds the
    projections' elements, before the norms.
    """

    norm: RMSNorm
    qkv_proj: QKVParallelLinear
    out_proj: RowParallelLinear
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    clip: float | None = None

    def keys_values(self, x: Tensor, rotary: Rotary, out: Tensor) -> None:
        """Write this layer's projections of the rows of a chunk, queries and keys rotated.

        Args:
            x: [R, D], the residual stream.
            rotary: the table rows of these rows' positions.
            out: [R, (H + 2 KV) hd], queries, keys and values side by side; or [R, 2 KV hd],
                keys and values alone. Written; `split` finds the parts.
        """
        if x.shape[0] == 0:
            return
        columns = slice(self._width - out.shape[1], None)
        self._project(x, columns, out)
        q, k, _ = self.split(out)
        self._rotate(q, k, rotary)

    def split(self, product: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Queries [R, H, hd], if they are there, keys and values [R, KV, hd]; views of `product`.

        Args:
            product: as `keys_values` writes it.
        """
        head_dim = self.qkv_proj.head_size
        heads = product.view(product.shape[0], -1, head_dim)
        num_kv_heads = self.qkv_proj.num_kv_heads
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return (q if num_heads else None), k, v

    def attend(
        self, x: Tensor, rotary: Rotary, sources: Sequence[KeySource], q: Tensor | None = None
    ) -> None:
        """x += Wo attention(q, k, v), in place, summed over the ranks.

        Args:
            x: [R, D], the residual stream, not yet updated by this layer; written.
            rotary: the table rows of these rows' positions.
            sources: what the rows read; they tile the rows. Keys and values are complete.
            q: [R, H, hd] as `keys_values` wrote them; None computes them from x.
        """
        if x.shape[0] == 0:
            return
        if q is None:
            q = self._queries(x, rotary)
        ops.add_linear(x, _attend_all(q, sources).flatten(1), self.out_proj)

    def _queries(self, x: Tensor, rotary: Rotary) -> Tensor:
        """The rotated queries [R, H, hd] of a chunk of the residual stream."""
        num_heads, head_dim = self.qkv_proj.num_heads, self.qkv_proj.head_size
        product = self._project(x, slice(0, num_heads * head_dim))
        q = product.view(-1, num_heads, head_dim)
        self._rotate(q, None, rotary)
        return q

    def _rotate(self, q: Tensor | None, k: Tensor | None, rotary: Rotary) -> None:
        """Norm queries and keys where the model does so, then rotate them, in place.

        A norm of each head alone is one pass with the rotation; one over all heads needs its own.
        """
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            ops.apply_rotary(q, k, rotary.cos, rotary.sin)
        elif isinstance(q_norm, AllHeadsRMSNorm):
            if q is not None:
                q_norm(q, out=q)
            if k is not None:
                k_norm(k, out=k)
            ops.apply_rotary(q, k, rotary.cos, rotary.sin)
        else:
            weights = (q_norm.weight, k_norm.weight)
            ops.norm_rotary(q, k, weights, q_norm.eps, rotary.cos, rotary.sin)

    def _project(self, x: Tensor, columns: slice, out: Tensor | None = None) -> Tensor:
        """Columns of the fused product of the normed rows, clipped where the model does so."""
        product = ops.linear(self.norm(x), self.qkv_proj, out=out, columns=columns)
        return product if self.clip is None else product.clamp_(-self.clip, self.clip)

    @property
    def _width(self) -> int:
        """Columns of the fused product on this rank."""
        heads = self.qkv_proj.num_heads + 2 * self.qkv_proj.num_kv_heads
        return int(heads * self.qkv_proj.head_size)


def _attend_all(q: Tensor, sources: Sequence[KeySource]) -> Tensor:
    """Attention [R, H, hd] of the rows of every source to its keys."""
    if len(sources) == 1:
        return attend(q, sources[0].k, sources[0].v, sources[0].layout)
    heads = torch.empty_like(q, memory_format=torch.contiguous_format)
    for rows, k, v, layout in sources:
        attend(q[rows], k, v, layout, out=heads[rows])
    return heads

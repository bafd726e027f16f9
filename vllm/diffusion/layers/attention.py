# SPDX-License-Identifier: Apache-2.0
"""Keys-values stage and attend stage of a layer.

Letters: R rows of a chunk, N rows of a key and value buffer, D hidden size, H and KV query and
key/value heads of this rank, hd head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.core.devices import num_multiprocessors
from vllm.diffusion.core.spans import HeadGroup
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.layers.attention_backends import attend, reads_pages
from vllm.diffusion.layers.norm import AllHeadsRMSNorm
from vllm.diffusion.layers.split_attention import can_split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from vllm.diffusion.core.spans import KeySource, KeyTarget
    from vllm.diffusion.core.stages import Buffer, Buffers
    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.diffusion.layers.rotary import Rotary


ALL_HEADS = HeadGroup(0, 1)


@dataclass(frozen=True)
class SelfAttention:
    """Keys-values stage and attend stage of one layer, over weights owned elsewhere.

    Both stages work on all heads at once, with projections side by side in one product.
    `q_norm` and `k_norm` are both given or both None: `RMSNorm` for a model that norms each head
    [hd], `AllHeadsRMSNorm` for a model that norms all heads together. `clip` limits the
    projections' elements, before the norms. `kernel` computes attention to one source, and may
    take `split_rows` rows of parts (`stages.split_attention`) per multiprocessor.
    """

    norm: RMSNorm
    qkv_proj: ops.Projection
    out_proj: ops.Projection
    num_heads: int  # query heads of this rank
    num_kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    clip: float | None = None
    kernel: Callable[..., Tensor] = attend
    split_rows: int = stages.SPLIT_ROWS

    @property
    def products(self) -> tuple[ops.Projection, ...]:
        """Projections in the order of their use."""
        return self.qkv_proj, self.out_proj

    def keys_values(
        self,
        x: Tensor,
        rotary: Rotary,
        out: Tensor,
        buffers: Buffers,
        target: KeyTarget | None = None,
    ) -> None:
        """Write this layer's projections of the rows of a chunk, with rotated queries and keys.

        Args:
            x: [R, D], the residual stream.
            rotary: the table rows of these rows' positions.
            out: [R, (H + 2 KV) hd], queries, keys and values side by side; or [R, 2 KV hd], keys
                and values only. Written; `split` returns the parts.
            buffers: scratch memory.
            target: store for the keys and values of some rows.
        """
        if x.shape[0] == 0:
            return
        with buffers.scope("keys-values"):
            normed = self.normed(x, stages.normed(x.dtype, x.shape[1]), buffers)
            self.project(normed, slice(-out.shape[1], None), out, buffers)
            q, k, v = self.split(out)
            self.rotate(q, k, rotary, None if target is None else ops.Kept(v, *target))

    def split(self, product: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return queries [R, H, hd] or None, keys and values [R, KV, hd] of a product as views.

        The product has the layout of `keys_values`.
        """
        heads = product.view(product.shape[0], -1, self.head_dim)
        num_kv_heads = self.num_kv_heads
        num_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        return (q if num_heads else None), k, v

    def attend(
        self,
        x: Tensor,
        rotary: Rotary,
        sources: Sequence[KeySource],
        q: Tensor | None,
        buffers: Buffers,
    ) -> None:
        """Add Wo attention(q, k, v), summed over ranks, to x.

        Args:
            x: [R, D], the residual stream.
            rotary: the table rows of these rows' positions.
            sources: keys and values that the rows read; they tile the rows.
            q: [R, H, hd] as written by `keys_values`; None computes them from x.
            buffers: scratch memory.
        """
        if x.shape[0] == 0:
            return
        with buffers.scope("attend"):
            if q is None:
                q = self.queries(x, rotary, ALL_HEADS, buffers)
            heads = attend_all(q, sources, buffers, self)
            self.add(x, heads, ALL_HEADS, buffers)

    def queries(self, x: Tensor, rotary: Rotary, group: HeadGroup, buffers: Buffers) -> Tensor:
        """Compute the rotated queries [R, H / groups, hd] of a chunk of the residual stream."""
        columns = group.part(self.query_width)
        heads, quantises = (self.num_heads // group.count, self.head_dim), self.qkv_proj.quantises
        queries, rows = stages.querying(x.dtype, x.shape[1], *heads, quantises=quantises)
        q = queries.take(buffers, len(x))
        # Other ranks may have all rows of a divided chunk.
        if x.shape[0]:
            with buffers.scope("attend"):
                normed = self.normed(x, rows, buffers)
                self.project(normed, columns, q.flatten(1), buffers)
            self.rotate(q, None, rotary)
        return q

    def rotate(
        self,
        q: Tensor | None,
        k: Tensor | None,
        rotary: Rotary,
        kept: ops.Kept | None = None,
        fp8: ops.Fp8Heads | None = None,
    ) -> None:
        """Norm queries and keys if the model does, rotate them in place, store keys, copy as fp8.

        A norm of each head is fused with the rotation; a norm over all heads is a separate pass.
        """
        q_norm, k_norm, tables = self.q_norm, self.k_norm, (rotary.cos, rotary.sin)
        if q_norm is None or k_norm is None:
            ops.apply_rotary(q, k, *tables, kept, fp8)
        elif isinstance(q_norm, AllHeadsRMSNorm):
            if q is not None:
                q_norm(q, out=q)
            if k is not None:
                k_norm(k, out=k)
            ops.apply_rotary(q, k, *tables, kept, fp8)
        else:
            weights = (q_norm.weight, k_norm.weight)
            ops.norm_rotary(q, k, *weights, q_norm.eps, *tables, kept, fp8)
        if q is not None and rotary.scale is not None:
            q.mul_(rotary.scale[:, None, None])

    def add(self, x: Tensor, heads: Tensor, group: HeadGroup, buffers: Buffers) -> None:
        """Add Wo heads to x, with heads [R, H / groups, hd] of one group."""
        if x.shape[0]:
            features = slice(None) if group.count == 1 else group.part(self.query_width)
            self.out_proj.add_to(x, heads.flatten(1), buffers, features)

    def normed(self, x: Tensor, listed: Buffer, buffers: Buffers) -> Tensor | ops.QuantisedRows:
        if listed.is_temporary:
            buffers = FreshBuffers(x.device, buffers)
        out = self.qkv_proj.rows(listed, len(x), buffers)
        normed: Tensor | ops.QuantisedRows = self.norm(x, out=out)
        return normed

    def project(
        self, normed: Tensor | ops.QuantisedRows, columns: slice, out: Tensor, buffers: Buffers
    ) -> None:
        """Write columns of the fused product of the normed rows, clipped to `clip`."""
        self.qkv_proj.project(normed, out, buffers, columns)
        if self.clip is not None:
            out.clamp_(-self.clip, self.clip)

    @property
    def query_width(self) -> int:
        """Number of columns of the queries in the fused product on this rank."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Number of columns of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim


def attend_all(
    q: Tensor, sources: Sequence[KeySource], buffers: Buffers, layer: SelfAttention
) -> Tensor:
    """Return the attention [R, H, hd] of the rows of every source to its keys."""
    attended, statistics, collected = stages.attending(q.dtype, *q.shape[1:])
    attended.expect(buffers, len(q))
    statistics.expect(buffers, len(q))
    if q.is_cuda and can_split(q.dtype, q.shape[2], q.device):
        split_rows = layer.split_rows * num_multiprocessors(q.device)
        stages.split_attention(q.shape[2]).expect(buffers, split_rows)
    for k, _, layout in sources:
        if layout.pages is not None and not reads_pages(q.dtype, q.shape[2], q.device):
            keys = stages.collected_keys(k.dtype, *k.shape[1:])
            keys.expect(buffers, layout.max_keys)
    if len(sources) == 1:
        layout = sources[0].layout
        if layout.spans is not None and len(layout.spans) > 1:
            collected.expect(buffers, len(q))
        return layer.kernel(q, sources[0].k, sources[0].v, layout)
    heads = collected.take(buffers, len(q))
    for k, v, layout in sources:
        layer.kernel(q[layout.rows], k, v, layout, out=heads[layout.rows])
    return heads

# SPDX-License-Identifier: Apache-2.0
"""Stages of Gemma 4's layers.

Each branch of a layer has a norm before and a norm behind it. A dense MLP and a mixture of experts
read the same rows, and their results are added. Letters: R rows of a chunk, D hidden size, E
experts, k experts of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.layers.attention import SelfAttention
from vllm.diffusion.layers.gemma_rows import Scalars, add_branches, add_normed, gelu_mul

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vllm.diffusion.core.spans import HeadGroup, KeySource, KeyTarget
    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.diffusion.layers.rotary import Rotary


@dataclass(frozen=True, kw_only=True)
class GemmaAttention(SelfAttention):
    """Attention whose values are normed, and whose result is normed before it is added.

    Layers have different heads. The buffers of a step are as wide as the widest layer requires, and
    a layer uses their first columns.

    Attributes:
        out_norm: norm of the result.
        unit_gains: [hd] ones, gains of the norm of values.
        table_columns: this layer's columns of the rotary tables.
    """

    out_norm: RMSNorm
    unit_gains: Tensor
    table_columns: slice

    def keys_values(
        self,
        x: Tensor,
        rotary: Rotary,
        out: Tensor,
        buffers: Buffers,
        target: KeyTarget | None = None,
    ) -> None:
        if target is not None:
            target = target._replace(k=self._own_heads(target.k), v=self._own_heads(target.v))
        super().keys_values(x, rotary, self._own_columns(out), buffers, target)

    def split(self, product: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        return super().split(self._own_columns(product))

    def attend(
        self,
        x: Tensor,
        rotary: Rotary,
        sources: Sequence[KeySource],
        q: Tensor | None,
        buffers: Buffers,
    ) -> None:
        own = [s._replace(k=self._own_heads(s.k), v=self._own_heads(s.v)) for s in sources]
        super().attend(x, rotary, own, q, buffers)

    def project(
        self, normed: Tensor | ops.QuantisedRows, columns: slice, out: Tensor, buffers: Buffers
    ) -> None:
        super().project(normed, columns, out, buffers)
        if columns.stop is None:  # The last columns of the product are values.
            _, _, v = super().split(out)
            ops.rms_norm(v, self.unit_gains, self.norm.eps, out=v)

    def rotate(
        self,
        q: Tensor | None,
        k: Tensor | None,
        rotary: Rotary,
        kept: ops.Kept | None = None,
        fp8: ops.Fp8Heads | None = None,
    ) -> None:
        columns = self.table_columns
        tables = rotary._replace(cos=rotary.cos[:, columns], sin=rotary.sin[:, columns])
        super().rotate(q, k, tables, kept, fp8)

    def add(self, x: Tensor, heads: Tensor, group: HeadGroup, buffers: Buffers) -> None:
        if x.shape[0]:
            result = product_of(self.out_proj, heads.flatten(1), x, buffers)
            add_normed(x, result, self.out_norm)

    def _own_columns(self, product: Tensor) -> Tensor:
        """Return this layer's columns of a product, which has queries if it is wide enough."""
        own = self.query_width + 2 * self.key_width
        return product[:, : own if product.shape[1] >= own else 2 * self.key_width]

    def _own_heads(self, rows: Tensor) -> Tensor:
        """Return rows of keys or values as [N, KV, hd]; rows of the page store may be wider."""
        own = rows.flatten(1)[:, : self.key_width]
        return own.view(len(own), self.num_kv_heads, self.head_dim)


class Router(NamedTuple):
    """Choice of experts.

    Attributes:
        scale: [D], gain of the normed rows.
        gate: [E, D].
        expert_scale: [E] fp32, factor of an expert's weight.
        num_chosen: k.
        eps: epsilon of the norm.
    """

    scale: Tensor
    gate: Tensor
    expert_scale: Tensor
    num_chosen: int
    eps: float

    def route(self, x: Tensor) -> ops.Routing:
        """Choose the experts of rows x [R, D]; ties go to the lowest expert."""
        scoring = ops.Scoring(is_normalised=True, in_fp32=True, logit_scale=x.shape[1] ** -0.5)
        rows = ops.rms_norm(x, self.scale, self.eps)
        return ops.route_rows(
            rows, self.gate, self.num_chosen, None, scoring, expert_scales=self.expert_scale
        )


@dataclass(frozen=True)
class GemmaFeedForward:
    """Feed-forward stage: a dense MLP and a mixture of experts, which read the same rows.

    The rows are normed before and after the dense MLP, before and after the experts, and after the
    sum of both; `norms` has this order. `w1` [E, 2I, D] has the gate's rows first; `w2` is
    [E, D, I]. `scalars` are the factors of the residual stream after the layer.
    """

    norms: tuple[RMSNorm, RMSNorm, RMSNorm, RMSNorm, RMSNorm]
    gate_up_proj: ops.Projection
    down_proj: ops.Projection
    width: int
    router: Router
    w1: ops.ExpertWeights
    w2: ops.ExpertWeights
    scalars: Scalars

    @property
    def products(self) -> tuple[ops.Projection, ...]:
        """Projections in the order of their use."""
        return self.gate_up_proj, self.down_proj

    def feed_forward(self, x: Tensor, buffers: Buffers, is_block: Tensor | None = None) -> None:
        """Add the normed sum of both branches to x [R, D] and scale the sum, in place.

        `is_block` [R] bool states whether a row belongs to a block that is denoised; None if all
        rows do.
        """
        if x.shape[0] == 0:
            return
        before_dense, behind_dense, before_experts, behind_experts, behind = self.norms
        with buffers.scope("feed-forward"):
            rows = stages.normed(x.dtype, x.shape[1])
            normed = before_dense(x, self.gate_up_proj.rows(rows, len(x), buffers))
            inner = gelu_product(normed, self.gate_up_proj, self.width, x, buffers)
            dense = product_of(self.down_proj, inner, x, buffers)
            given = before_experts(x), self.router.route(x), self.w1, self.w2
            shares: Tensor | None = given[1].weights
            if self.down_proj.is_summed:  # over ranks, which hold a part of every expert's width
                mixed = torch.zeros_like(x)
                ops.add_experts(mixed, *given, buffers, in_fp32=True, is_gelu=True)
                terms, shares = mixed[:, None], None
            else:
                terms = ops.expert_terms(*given, is_weighted=False, is_gelu=True)
            behind_both = behind_dense, behind_experts, behind
            add_branches(x, dense, terms, shares, behind_both, self.scalars, is_block)


def gelu_product(
    x: Tensor | ops.QuantisedRows,
    gate_up_proj: ops.Projection,
    width: int,
    like: Tensor,
    buffers: Buffers,
) -> Tensor:
    """Return gelu(Wgate x) * Wup x [R, width] of rows x, in the dtype of `like`."""
    gate_up = stages.gate_up(like.dtype, 2 * width).take(buffers, len(like))
    gate_up_proj.project(x, gate_up, buffers)
    return gelu_mul(gate_up)


def product_of(projection: ops.Projection, h: Tensor, like: Tensor, buffers: Buffers) -> Tensor:
    """Return h W^T [R, D], summed over the ranks if the layer is row parallel."""
    if projection.is_summed:
        out = torch.zeros_like(like)
        projection.add_to(out, h, buffers)
        return out
    out = torch.empty_like(like)
    projection.multiply(h, out, buffers)
    return out

# SPDX-License-Identifier: Apache-2.0
"""Stages of Gemma 4's layers, in PyTorch.

Each branch of a layer has a norm before and a norm behind it. A dense MLP and a mixture of experts
read the same rows, and their results are added. Letters: R rows of a chunk, D hidden size, E
experts, k experts of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import gelu

from vllm.diffusion.core import stages
from vllm.diffusion.layers.attention import ALL_HEADS, SelfAttention
from vllm.diffusion.layers.norm import unit_rms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vllm.diffusion import ops
    from vllm.diffusion.core.buffers import Buffers
    from vllm.diffusion.core.spans import HeadGroup, KeySource, KeyTarget
    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.diffusion.parallel.head_exchange import HeadExchange


@dataclass(frozen=True, kw_only=True)
class GemmaAttention(SelfAttention):
    """Attention whose values are normed, and whose result is normed before it is added.

    Layers have different heads. The buffers of a step are as wide as the widest layer requires, and
    a layer uses their first columns.

    Attributes:
        out_norm: norm of the result.
        table_columns: this layer's columns of the rotary tables.
    """

    out_norm: RMSNorm
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
        group: HeadGroup = ALL_HEADS,
        *,
        updated: Tensor | None = None,
        exchange: HeadExchange | None = None,
        num_adapter_rows: int = 0,
    ) -> None:
        own = [s._replace(k=self._own_heads(s.k), v=self._own_heads(s.v)) for s in sources]
        super().attend(x, rotary, own, q, buffers, group, updated=updated, exchange=exchange)

    def project(
        self, normed: Tensor | ops.QuantisedRows, columns: slice, out: Tensor, buffers: Buffers
    ) -> None:
        super().project(normed, columns, out, buffers)
        if columns.stop is None:  # The last columns of the product are values.
            _, _, v = super().split(out)
            v.copy_(unit_rms(v, self.norm.eps))

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
            product = stages.projected(x.dtype, x.shape[1]).take(buffers, len(x))
            self.out_proj.multiply(heads.flatten(1), product, buffers)
            x.add_(self.out_norm(product))

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
        expert_scale: [E], factor of an expert's weight.
        num_chosen: k.
        eps: epsilon of the norm.
    """

    scale: Tensor
    gate: Tensor
    expert_scale: Tensor
    num_chosen: int
    eps: float

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts [R, k] of rows x [R, D], and their weights, in the dtype of x.

        Of equally probable experts, the one with the lowest index is chosen.
        """
        rows = unit_rms(x, self.eps) * self.scale * x.shape[1] ** -0.5
        shares = torch.softmax(rows @ self.gate.T, dim=-1, dtype=torch.float32)
        ordered, experts = shares.sort(dim=-1, descending=True, stable=True)
        chosen, weights = experts[:, : self.num_chosen], ordered[:, : self.num_chosen]
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return chosen, (weights * self.expert_scale[chosen]).to(x.dtype)


@dataclass(frozen=True)
class GemmaFeedForward:
    """Feed-forward stage: a dense MLP and a mixture of experts, which read the same rows.

    The rows are normed before and after the dense MLP, before and after the experts, and after the
    sum of both; `norms` has this order. `w1` [E, 2I, D] has the gate's rows first; `w2` is
    [E, D, I]. `in_block` or `in_context`, [1] each, is the factor of the residual stream after the
    layer.
    """

    norms: tuple[RMSNorm, RMSNorm, RMSNorm, RMSNorm, RMSNorm]
    gate_up_proj: ops.Projection
    down_proj: ops.Projection
    width: int
    router: Router
    w1: Tensor
    w2: Tensor
    in_block: Tensor
    in_context: Tensor

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
            dense = gelu_mlp(
                before_dense(x), self.gate_up_proj, self.down_proj, self.width, buffers
            )
            chosen, weights = self.router.route(x)
            mixed = gelu_experts(before_experts(x), chosen, weights, self.w1, self.w2)
            x.add_(behind(behind_dense(dense) + behind_experts(mixed)))
            scalar = self.in_block
            if is_block is not None:
                scalar = torch.where(is_block[:, None], scalar, self.in_context)
            x.mul_(scalar)


def gelu_mlp(
    x: Tensor, gate_up_proj: ops.Projection, down_proj: ops.Projection, width: int, buffers: Buffers
) -> Tensor:
    """Return Wdown (gelu(Wgate x) * Wup x) [R, D] of rows x [R, D]; `width` is the inner width."""
    gate_up = stages.gate_up(x.dtype, 2 * width).take(buffers, len(x))
    gate_up_proj.project(x, gate_up, buffers)
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(x)
    down_proj.multiply(gelu(gate, approximate="tanh") * up, out, buffers)
    return out


def gelu_experts(x: Tensor, chosen: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Return the weighted sum [R, D] of the chosen experts of rows x [R, D], with gelu.

    Args:
        x: the rows.
        chosen: [R, k] int64, the experts of every row.
        weights: [R, k], their weights.
        w1: [E, 2I, D], the gate's rows first.
        w2: [E, D, I].
    """
    out = torch.zeros_like(x)
    for expert in range(len(w1)):
        rows, places = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[rows] @ w1[expert].T).chunk(2, dim=-1)
        terms = (gelu(gate, approximate="tanh") * up) @ w2[expert].T
        out.index_add_(0, rows, terms * weights[rows, places, None])
    return out

# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer by groups of heads, whose rows may be divided between ranks.

Letters are those of `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion.core import stages
from vllm.diffusion.layers.attention import attend_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vllm.diffusion.core.spans import HeadGroup, KeySource
    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.layers.attention import SelfAttention
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.diffusion.parallel.head_exchange import HeadExchange


@dataclass(frozen=True)
class HeadGroupAttention:
    """Attention by groups of heads, over the projections and norms of a layer's `SelfAttention`.

    The weights of the layer can be sliced, and no norm spans all heads.
    """

    layer: SelfAttention

    def keys_values(
        self, group: HeadGroup, x: Tensor, rotary: Rotary, k: Tensor, v: Tensor, buffers: Buffers
    ) -> None:
        """Write the rotated keys, and the values, of one group of heads.

        Args:
            group: the heads.
            x: [R, D], the residual stream.
            rotary: the table rows of these rows' positions.
            k, v: [R, KV / groups, hd], contiguous, written.
            buffers: scratch memory.
        """
        if x.shape[0] == 0:
            return
        with buffers.scope("keys-values"):
            self.project(group, x, (None, k, v), buffers)
            self.layer.rotate(None, k, rotary)

    def project(
        self,
        group: HeadGroup,
        x: Tensor,
        parts: tuple[Tensor | None, Tensor, Tensor],
        buffers: Buffers,
    ) -> None:
        """Project x [R, D] to the queries, unless None, keys and values of one group of heads.

        `parts` are [R, heads / groups, hd], contiguous, written before norms and rotation.
        """
        layer = self.layer
        normed = layer.normed(x, stages.normed(x.dtype, x.shape[1]), buffers)
        start = 0
        for heads, width in zip(parts, (layer.query_width, *[layer.key_width] * 2), strict=True):
            columns = group.part(width)
            if heads is not None:
                columns = slice(start + columns.start, start + columns.stop)
                layer.project(normed, columns, heads.flatten(1), buffers)
            start += width

    def attend(
        self,
        group: HeadGroup,
        x: Tensor,
        rotary: Rotary,
        sources: Sequence[KeySource],
        updated: Tensor,
        buffers: Buffers,
        exchange: HeadExchange | None = None,
    ) -> None:
        """Add Wo attention(q, k, v) of one group of heads, summed over ranks, to `updated`.

        Args:
            group: the heads.
            x: [R, D], the residual stream, not yet updated by this layer.
            rotary: the table rows of these rows' positions.
            sources: keys and values of the group that the rows read; they tile the rows.
            updated: [R, D], written; x itself requires a single group.
            buffers: scratch memory.
            exchange: exchange with ranks that have other rows; `sources` then cover all ranks'
                rows, for this rank's heads.
        """
        if x.shape[0] == 0 and exchange is None:
            return
        layer = self.layer
        with buffers.scope("attend"):
            q = layer.queries(x, rotary, group, buffers)
            if exchange is None:
                heads = attend_all(q, sources, buffers, layer)
            else:
                exchanged = exchange.to_heads(q, buffers)
                exchanged = attend_all(exchanged, sources, buffers, layer)
                heads = exchange.to_rows(exchanged, q, buffers)
            layer.add(updated, heads, group, buffers)

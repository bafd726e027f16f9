# SPDX-License-Identifier: Apache-2.0
"""Attention with fp8 (e4m3) queries, keys, values and results, of one request in one layer.

A vector close to the mean over the positions is subtracted from the keys, which changes no softmax,
and every number is divided by a scale. Mean and scales must be fixed before the first chunk of keys
is stored. So they come from a survey: the queries, keys and values of at most `SURVEYED_ROWS`
positions, spread over the whole request. Any vector would be valid as mean. Numbers beyond
`HEADROOM` times the largest surveyed number become the largest of the format. As e4m3 is a floating
format, numbers a thousandth of the largest are as exact as the largest, so this headroom costs no
precision. Scales are powers of two, so dividing by them rounds nothing.

No result is larger than the largest value, and in a long sequence most are far smaller, so results
use a quarter of the values' scale.

Letters: R rows of a chunk, N rows of the keys and values, H and KV heads of this rank (or of one of
several groups of heads), hd head width, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core import fp8_stages, stages
from vllm.diffusion.layers.attention import ALL_HEADS
from vllm.diffusion.layers.attention_backends import attend
from vllm.diffusion.layers.head_group_attention import HeadGroupAttention
from vllm.diffusion.parallel.head_exchange import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout, HeadGroup, KeyTarget
    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.layers.attention import SelfAttention
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.diffusion.ops import Array
    from vllm.diffusion.parallel.head_exchange import HeadExchange

SURVEYED_ROWS = 1024
HEADROOM = 8.0


class HeadScales(NamedTuple):
    """Mean and scales of the fp8 heads of one request, layer and group of heads.

    Attributes:
        mean: [KV, hd] fp32, subtracted from keys.
        scales: [4] fp32, powers of two: scales of queries, keys, values and results.
    """

    mean: Tensor
    scales: Tensor


@dataclass(frozen=True)
class Fp8Attention:
    """fp8 attention of one layer, over the projections and norms of its `SelfAttention`."""

    layer: SelfAttention

    @staticmethod
    def surveyed_rows(num_rows: int) -> Array:
        """Choose rows of a request to survey, ascending [r] int64: all rows, or 1,024 of many rows.

        Of many rows, one is drawn from each of 1,024 equal parts, always with the same random
        numbers. With equal steps, some rotary frequencies would appear constant. The first row is
        always included, because many models give the first position keys that are unlike all
        others.
        """
        if num_rows <= SURVEYED_ROWS:
            return np.arange(num_rows)
        edges = np.arange(SURVEYED_ROWS + 1) * num_rows // SURVEYED_ROWS
        offsets = np.random.default_rng(0).random(SURVEYED_ROWS)
        rows: Array = edges[:-1] + (offsets * np.diff(edges)).astype(np.int64)
        rows[0] = 0
        return rows

    def survey(self, group: HeadGroup, x: Tensor, rotary: Rotary, buffers: Buffers) -> Tensor:
        """Return statistics [3 KV hd + 3] of some rows, for `merged` and `scales_from`.

        Args:
            group: the heads.
            x: [R, D], rows of the residual stream.
            rotary: the table rows of these rows' positions.
            buffers: scratch memory.
        """
        layer = self.layer
        width = layer.key_width // group.count
        if not len(x):
            none = torch.full((3 * width + 3,), -torch.inf, dtype=torch.float64, device=x.device)
            return none.index_fill_(0, torch.arange(width + 1, device=x.device), 0.0)
        with buffers.scope("survey"):
            q, k, v = self._projected(group, x, buffers, has_queries=True)
            assert q is not None
            layer.rotate(q, k, rotary)
            keys = k.flatten(1).double()
            largest = torch.stack([part.abs().amax().double() for part in (q, v)])
            count = keys.new_full((1,), len(x))
            return torch.cat((keys.sum(0), count, keys.amax(0), (-keys).amax(0), largest))

    def merged(self, statistics: Tensor, group: HeadGroup) -> Tensor:
        """Merge the statistics [n, 3 KV hd + 3] of several surveys, of pieces or of ranks."""
        sums = self.layer.key_width // group.count + 1
        return torch.cat((statistics[:, :sums].sum(0), statistics[:, sums:].amax(0)))

    def scales_from(self, statistics: Tensor, group: HeadGroup) -> HeadScales:
        """Return mean and scales from the statistics of all surveyed rows.

        Sums are fp64, so their order hardly matters: any division into ranks and pieces gives the
        same result.
        """
        width = self.layer.key_width // group.count
        total, count, most = statistics[:width], statistics[width], statistics[width + 1 :]
        mean = total / count
        keys = torch.maximum(most[:width] - mean, most[width : 2 * width] + mean).amax()
        largest = torch.stack((most[-2], keys, most[-1]))
        # The exponent e with largest * HEADROOM < 448 * 2^e, converted to a number by its bits.
        _, exponents = torch.frexp((largest * (HEADROOM / fp8_stages.LARGEST)).float())
        scales = (exponents.int().clamp(-100, 100) + 127 << 23).view(torch.float32)
        scales = torch.cat((scales, scales[2:] / 4))
        return HeadScales(mean.float().view(-1, self.layer.head_dim), scales)

    def keys_values(
        self,
        group: HeadGroup,
        x: Tensor,
        rotary: Rotary,
        known: HeadScales,
        k: Tensor,
        v: Tensor,
        buffers: Buffers,
        target: KeyTarget | None = None,
    ) -> None:
        """Write the rotated keys, and the values, of one group of heads.

        Args:
            known: mean and scales.
            k, v: [R, KV, hd] fp8, written.
            target: store for the keys and values of some rows, in the model dtype.

        For the other arguments see `HeadGroupAttention.keys_values`.
        """
        if not len(x):
            return
        with buffers.scope("keys-values"):
            _, keys, values = self._projected(group, x, buffers, has_queries=False)
            kept = None if target is None else ops.Kept(values, *target)
            copies = ops.Fp8Heads(None, k, v, values, *known)
            self.layer.rotate(None, keys, rotary, kept, copies)

    def attend(
        self,
        x: Tensor,
        rotary: Rotary,
        keys_values: tuple[Tensor, Tensor],
        layout: AttentionLayout[Tensor],
        known: HeadScales,
        buffers: Buffers,
        group: HeadGroup = ALL_HEADS,
        *,
        updated: Tensor | None = None,
        exchange: HeadExchange | None = None,
    ) -> None:
        """Add Wo attention(q, k, v) of one group of heads, summed over ranks, to `updated`.

        Args:
            keys_values: [N, KV, hd] fp8 each; with an `exchange`, of this rank's heads only.
            layout: the keys that the rows read.
            known: mean and scales.
            updated: [R, D], written; None for x itself, which requires a single group.

        For the other arguments see `HeadGroupAttention.attend`.
        """
        if not len(x) and exchange is None:
            return
        layer, num_rows = self.layer, len(x)
        heads = layer.num_heads // group.count, layer.head_dim
        fp8_queries, attended = fp8_stages.attending(*heads)
        with buffers.scope("attend"):
            queries, normed = self._querying(x, group)
            q, q8 = queries.take(buffers, num_rows), fp8_queries.take(buffers, num_rows)
            # Other ranks may have all rows of a divided chunk.
            if num_rows:
                with buffers.scope("attend"):
                    rows = layer.normed(x, normed, buffers)
                    layer.project(rows, group.part(layer.query_width), q.flatten(1), buffers)
                copies = ops.Fp8Heads(q8, None, None, None, *known)
                layer.rotate(q, None, rotary, None, copies)
            if exchange is None:
                out = attended.take(buffers, num_rows)
                attend(q8, *keys_values, layout, out, scales=known.scales)
            else:
                exchanged = exchange.to_heads(as_bytes(q8), buffers).view(q8.dtype)
                part = attended._replace(shape=exchanged.shape[1:]).take(buffers, len(exchanged))
                attend(exchanged, *keys_values, layout, part, scales=known.scales)
                out = exchange.to_rows(as_bytes(part), as_bytes(q8), buffers).view(q8.dtype)
            if num_rows:
                self._add(x if updated is None else updated, out, q, known, group, buffers)

    def whole(
        self, x: Tensor, rotary: Rotary, layout: AttentionLayout[Tensor], buffers: Buffers
    ) -> None:
        """Add Wo attention(q, k, v) of all rows of a request to x [T, D], without chunks."""
        rows = torch.from_numpy(self.surveyed_rows(len(x))).to(x.device)
        tables = rotary.rows(rows)
        head_scales = self.scales_from(self.survey(ALL_HEADS, x[rows], tables, buffers), ALL_HEADS)
        heads = self.layer.num_kv_heads, self.layer.head_dim
        k, v = (part.take(buffers, len(x)) for part in fp8_stages.keys_values(*heads))
        self.keys_values(ALL_HEADS, x, rotary, head_scales, k, v, buffers)
        self.attend(x, rotary, (k, v), layout, head_scales, buffers)

    def _add(
        self,
        x: Tensor,
        out: Tensor,
        plain: Tensor,
        known: HeadScales,
        group: HeadGroup,
        buffers: Buffers,
    ) -> None:
        """Add Wo `out` to x; `plain` provides memory for these heads in the model dtype."""
        proj, scale = self.layer.out_proj, known.scales[3]
        features = slice(None) if group.count == 1 else group.part(self.layer.query_width)
        rows: Tensor | ops.QuantisedRows
        if proj.quantises:
            result_buffer = fp8_stages.results(plain.shape[1:].numel())
            scales = result_buffer.quantised[1].take(buffers, len(x)).fill_(1.0).mul_(scale)
            rows = ops.QuantisedRows(out.flatten(1), scales)
        else:
            rows = plain.copy_(out).mul_(scale).flatten(1)
        proj.add_to(x, rows, buffers, features)

    def _querying(self, x: Tensor, group: HeadGroup) -> stages.Listed:
        layer = self.layer
        heads = layer.num_heads // group.count, layer.head_dim
        quantises = layer.qkv_proj.quantises
        return stages.querying(x.dtype, x.shape[1], *heads, quantises=quantises)

    def _projected(
        self, group: HeadGroup, x: Tensor, buffers: Buffers, *, has_queries: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """Project rows to a group's queries [R, H, hd] if needed, keys and values [R, KV, hd]."""
        layer, num_rows = self.layer, len(x)
        heads = layer.num_kv_heads // group.count, layer.head_dim
        k, v = (
            part.take(buffers, num_rows)
            for part in stages.keys_values(x.dtype, *heads, is_own=True)
        )
        q = self._querying(x, group)[0].take(buffers, num_rows) if has_queries else None
        with buffers.scope("keys-values"):
            HeadGroupAttention(layer).project(group, x, (q, k, v), buffers)
        return q, k, v

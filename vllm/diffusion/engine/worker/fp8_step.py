# SPDX-License-Identifier: Apache-2.0
"""Steps of one request with fp8 attention: the device holds keys and values of a layer in fp8.

Before a group of heads of a layer is computed, some rows of the request are surveyed to derive the
mean of the keys and the scales. If ranks divide the rows, each rank surveys its own rows, and all
ranks merge their surveys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion import ops
from vllm.diffusion.core import fp8_stages
from vllm.diffusion.core.spans import KeyTarget
from vllm.diffusion.engine.worker.forward import target_of
from vllm.diffusion.engine.worker.streamed_layers import StreamedForward

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout, HeadGroup
    from vllm.diffusion.core.stages import Listed
    from vllm.diffusion.engine.worker.row_shares import Chunk, RowPartition


class Fp8Forward(StreamedForward):
    """Layers of one step with fp8 attention; arguments as in `StreamedForward`."""

    keys_dtype = fp8_stages.FP8

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        division: RowPartition = arguments[3]
        rows = self.model.layers[0].fp8_attention.surveyed_rows(division.num_rows)
        local_rows = division.local
        mine = rows[(rows >= local_rows.start) & (rows < local_rows.stop)] - local_rows.start
        longest = max(chunk.local.stop - chunk.local.start for chunk in self.cuts.keys_values)
        pieces = [mine[i : i + longest] for i in range(0, len(mine), max(longest, 1))]
        on_device = ops.to_device(tuple(pieces), self.inputs.positions.device)
        self._surveyed = list(zip(pieces, on_device, strict=True))

    def begin(self, index: int, group: HeadGroup) -> None:
        """Compute the mean of the keys and the scales of a group of heads of a layer."""
        attention, model, pool = self.model.layers[index].fp8_attention, self.model, self.pool
        nothing = torch.empty(0, model.hidden_size, dtype=model.dtype, device=self.k.device)
        none = model.rotary(self.inputs.positions[:0])
        surveys = [attention.survey(group, nothing, none, pool)]
        for host_rows, rows in self._surveyed:
            with pool.scope("survey"):
                x = fp8_stages.surveyed(model.dtype, model.hidden_size).take(pool, len(host_rows))
                self.x.select(rows, host_rows, x)
                rotary = model.rotary(self.inputs.positions[rows], pool)
                surveys.append(attention.survey(group, x, rotary, pool))
        local_survey = attention.merged(torch.stack(surveys), group)
        merged = attention.merged(self.peers.gather(local_survey), group)
        self._known = attention.scales_from(merged, group)

    def project(
        self, index: int, group: HeadGroup, chunk: Chunk, x: Tensor, k: Tensor, v: Tensor
    ) -> None:
        model = self.model
        rotary = model.rotary(self.inputs.positions[chunk.local], self.pool)
        target = target_of(chunk.local, len(self.k), index, self.inputs, self.caches)
        if target is not None:
            heads = group.part(model.num_kv_heads)
            target = KeyTarget(target.k[:, heads], target.v[:, heads], target.slots)
        attention = model.layers[index].fp8_attention
        attention.keys_values(group, x, rotary, self._known, k, v, self.pool, target)

    def keep(self, index: int, group: HeadGroup) -> None:
        """Do nothing, because each chunk has stored its keys and values in the model dtype."""

    def own_keys_values(self) -> Listed:
        return fp8_stages.keys_values(self.group_heads, self.model.head_dim)

    def attend(
        self,
        index: int,
        group: HeadGroup,
        chunk: Chunk,
        layouts: Sequence[AttentionLayout[Tensor]],
        x: Tensor,
        updated: Tensor,
    ) -> None:
        (layout,) = layouts
        rotary = self.model.rotary(self.inputs.positions[chunk.local], self.pool)
        self.model.layers[index].fp8_attention.attend(
            x,
            rotary,
            (self.k, self.v),
            layout,
            self._known,
            self.pool,
            group,
            updated=updated,
            exchange=chunk.exchange,
        )

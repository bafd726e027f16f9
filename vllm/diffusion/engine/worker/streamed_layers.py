# SPDX-License-Identifier: Apache-2.0
"""Layers of a step that need less device memory than one layer's keys, values and rows take.

Keys and values exist for one group of heads at a time. Rows of the residual stream may be in host
memory and visit the device in chunks. Every group adds its part of a layer's attention to the
updated rows, while other groups still need the original rows. So there are two stores of rows,
which are swapped from layer to layer; with one group a chunk is updated in place.

If ranks divide the rows, each rank has its share of the two stores, and the keys and values of all
rows for its own heads.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from vllm.diffusion import ops
from vllm.diffusion.core.spans import HeadGroup
from vllm.diffusion.core.stages import keys_values, read_rows, residual
from vllm.diffusion.engine.worker.forward import sources_of
from vllm.diffusion.memory import HostRows, ResidualRows
from vllm.diffusion.parallel.head_exchange import as_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch
    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout
    from vllm.diffusion.core.stages import Buffer, Listed
    from vllm.diffusion.engine.worker.batch import StepInputs
    from vllm.diffusion.engine.worker.forward import Chunked
    from vllm.diffusion.engine.worker.row_shares import (
        Chunk,
        LogitsExchange,
        RowPartition,
        StageChunks,
    )
    from vllm.diffusion.memory import ActivationPool, HostBuffers, PageStore, Plan
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.ops import Array


class StreamedForward:
    """Computes the layers of one step by groups of heads.

    Args:
        model: the model.
        plan: head groups, chunks, and location of the residual stream.
        inputs: inputs of this rank's rows, and of the chunks of all ranks.
        division: shares of the rows.
        cuts: chunks of every stage.
        pool: memory of the device.
        host: memory of the host, pinned if there is a GPU.
        caches: cached keys and values.
    """

    # Dtype of the step's keys and values; None for the model's dtype.
    keys_dtype: torch.dtype | None = None

    def __init__(
        self,
        model: DiffusionModel,
        plan: Plan,
        inputs: StepInputs[Tensor],
        division: RowPartition,
        cuts: StageChunks,
        pool: ActivationPool,
        host: HostBuffers,
        caches: PageStore,
    ) -> None:
        self.model, self.inputs, self.pool, self.caches = model, inputs, pool, caches
        num_groups = plan.layout.head_groups
        self._groups = [HeadGroup(i, num_groups) for i in range(num_groups)]
        # Stores have full length on every rank, so that all ranks use the same part of their pools.
        shape = (division.longest, model.hidden_size)
        stores: list[ResidualRows] = []
        for store in residual(model.dtype, model.hidden_size, num_groups):
            if plan.layout.host_residual:
                rows = host.take(store.name, shape, model.dtype)
                stores.append(HostRows(rows, pool, store, inputs.token_ids.device))
            else:
                stores.append(ResidualRows(store.take(pool, division.longest)))
        self.x, self._updated = stores[0], stores[-1]
        self.group_heads = model.num_kv_heads // num_groups
        heads = self.group_heads // division.peers.size, model.head_dim
        kv_buffers = keys_values(self.keys_dtype or model.dtype, *heads)
        self.k, self.v = (buffer.take(pool, division.num_rows) for buffer in kv_buffers)
        self._seconds = plan.chunk_seconds
        self.peers, self.cuts, count = division.peers, cuts, len(cuts.attend)
        self._layouts = inputs.layouts[:count]
        self._last_layouts = inputs.layouts[count:]

    def run(self) -> Chunked[None]:
        """Run all layers on all rows; the last layer only on chunks with sample rows."""
        yield from self._embed()
        cuts, last = self.cuts, len(self.model.layers) - 1
        for index in range(last + 1):
            attend, feed_forward, layouts = cuts.attend, cuts.feed_forward, self._layouts
            if index == last:
                attend, feed_forward = cuts.last_attend, cuts.last_feed_forward
                layouts = self._last_layouts
            if self.inputs.slot_mapping.numel():
                self.caches.turn_to(index)
            for group in self._groups:
                yield from self._keys_values(index, group)
                yield from self._attend(index, group, attend, layouts)
            self.x, self._updated = self._updated, self.x
            yield from self._feed_forward(index, feed_forward)

    def hidden(self, taken: LogitsExchange, given: Tensor) -> Tensor:
        """Return the hidden states [r, D] of this rank's part of a round, after `run`.

        `given` lists the rows, on the device, that this rank holds of all parts.
        """
        local_hidden, others = read_rows(self.model.dtype, self.model.hidden_size)
        if self.peers.size == 1:
            return self._select(local_hidden, given, taken.given)
        sent = self._select(others, given, taken.given)
        hidden = local_hidden.take(self.pool, sum(taken.received))
        self.peers.exchange(hidden, sent, taken.received, taken.sent)
        return hidden

    def _select(self, listed: Buffer, rows: Tensor, host_rows: Array) -> Tensor:
        """Gather rows [r] of this rank's share, given on the device and on the host: [r, D]."""
        x = listed.take(self.pool, len(host_rows))
        self.x.select(rows, host_rows, x)
        return x

    def _embed(self) -> Chunked[None]:
        ids, parts = self.inputs.token_ids, [c.local for c in self.cuts.feed_forward]
        visiting = self.x.visit(parts, reads=False, writes=True)
        with self.pool.scope("embed"), closing(visiting) as visits:
            for rows, x in zip(parts, visits, strict=True):
                yield 0.0
                self.model.embed(ids[rows], x)

    def _keys_values(self, index: int, group: HeadGroup) -> Chunked[None]:
        pool, writing = self.pool, self.cuts.keys_values
        self.begin(index, group)
        visiting = self.x.visit([chunk.local for chunk in writing])
        with pool.scope("keys-values"), closing(visiting) as visits:
            for chunk, x in zip(writing, visits, strict=True):
                yield self._seconds.keys_values
                with pool.scope("keys-values"):
                    k, v = self._own(chunk)
                    self.project(index, group, chunk, x, k, v)
                    self._give(k, self.k, chunk)
                    self._give(v, self.v, chunk)
        self.keep(index, group)

    def begin(self, index: int, group: HeadGroup) -> None:
        """Prepare for the keys and values of a group of heads of a layer."""

    def project(
        self, index: int, group: HeadGroup, chunk: Chunk, x: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write the rotated keys, and the values, of this rank's rows of a chunk.

        Args:
            index: index of the layer.
            group: group of heads.
            chunk: the chunk.
            x: [R, D], its rows.
            k, v: [R, KV / groups, hd], written.
        """
        rotary = self.model.rotary(self.inputs.positions[chunk.local], self.pool)
        attention = self.model.layers[index].head_group_attention
        attention.keys_values(group, x, rotary, k, v, self.pool)

    def keep(self, index: int, group: HeadGroup) -> None:
        """Store a group's keys and values of the rows that have slots."""
        heads = group.part(self.model.num_kv_heads)
        _keep(self.k, self.v, index, self.inputs.slot_mapping, self.caches, heads)

    def own_keys_values(self) -> Listed:
        """Return the buffers of a chunk's own keys and values, before ranks exchange them."""
        model = self.model
        return keys_values(model.dtype, self.group_heads, model.head_dim, is_own=True)

    def _own(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Return the buffers for this rank's keys and values: in place, or to be exchanged."""
        if chunk.exchange is None:
            return self.k[chunk.local], self.v[chunk.local]
        num_rows = chunk.local.stop - chunk.local.start
        k, v = (part.take(self.pool, num_rows) for part in self.own_keys_values())
        return k, v

    def _give(self, x: Tensor, target: Tensor, chunk: Chunk) -> None:
        """Exchange heads of this rank's rows for all rows of its heads, and store these rows."""
        if chunk.exchange is None:
            return
        with self.pool.scope("keys-values"):
            x = as_bytes(x)
            received = chunk.exchange.to_heads(x, self.pool).split(chunk.exchange.counts)
            for rows, part in zip(chunk.places, received, strict=True):
                target[rows] = part.view(target.dtype)

    def _attend(
        self,
        index: int,
        group: HeadGroup,
        work: list[Chunk],
        layouts: Sequence[Sequence[AttentionLayout[Tensor]]],
    ) -> Chunked[None]:
        pool = self.pool
        visiting = self._visit_both([c.local for c in work], is_first=group.index == 0)
        with pool.scope("attend"), closing(visiting) as visits:
            for chunk, layout, (x, updated) in zip(work, layouts, visits, strict=True):
                yield self._seconds.attend
                with pool.scope("attend"):
                    self.attend(index, group, chunk, layout, x, updated)

    def attend(
        self,
        index: int,
        group: HeadGroup,
        chunk: Chunk,
        layouts: Sequence[AttentionLayout[Tensor]],
        x: Tensor,
        updated: Tensor,
    ) -> None:
        """Add the attention of a chunk's rows to a group's heads to `updated` [R, D].

        Args:
            index, group, chunk, x: as for `project`.
            layouts: keys that the rows of the chunk read, including keys of other ranks.
            updated: [R, D], written; may be x.
        """
        heads = group.part(self.model.num_kv_heads)
        self.model.layers[index].head_group_attention.attend(
            group,
            x,
            self.model.rotary(self.inputs.positions[chunk.local], self.pool),
            sources_of(layouts, self.k, self.v, index, self.caches, heads),
            updated,
            self.pool,
            chunk.exchange,
        )

    def _visit_both(
        self, ranges: list[slice], *, is_first: bool
    ) -> Generator[tuple[Tensor, Tensor]]:
        """Yield chunks as they were before the layer, and as updated by the groups so far."""
        if self.x is self._updated:
            with closing(self.x.visit(ranges, writes=True)) as visits:
                for x in visits:
                    yield x, x
            return
        targets = self._updated.visit(ranges, reads=not is_first, writes=True)
        with closing(self.x.visit(ranges)) as visits, closing(targets):
            for x, updated in zip(visits, targets, strict=True):
                if is_first:
                    updated.copy_(x)
                yield x, updated

    def _feed_forward(self, index: int, work: list[Chunk]) -> Chunked[None]:
        visiting = self.x.visit([chunk.local for chunk in work], writes=True)
        with self.pool.scope("feed-forward"), closing(visiting) as visits:
            for _, x in zip(work, visits, strict=True):
                yield self._seconds.feed_forward
                self.model.layers[index].mlp_stage.feed_forward(x, self.pool)


def _keep(
    k: Tensor, v: Tensor, index: int, slot_mapping: Tensor, caches: PageStore, heads: slice
) -> None:
    """Store a layer's keys and values of the rows that have slots, which are the last rows.

    Args:
        k, v: [T, heads, hd].
        index: index of the layer.
        slot_mapping: slots, as in `StepInputs`.
        caches: the store.
        heads: the key/value heads in `k` and `v`.
    """
    num_kept = slot_mapping.numel()
    if num_kept:
        key_cache, value_cache = caches.keys(index)[:, heads], caches.values(index)[:, heads]
        ops.store_keys_values(k[-num_kept:], v[-num_kept:], key_cache, value_cache, slot_mapping)

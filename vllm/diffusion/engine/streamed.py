# SPDX-License-Identifier: Apache-2.0
"""A forward that needs less of the device than one layer's keys and values and all rows.

Keys and values exist for one group of heads at a time, and rows of the residual stream may lie in
host memory and visit the device in chunks. Every group adds its part of a layer's attention to the
updated rows while other groups still need the rows as they were. So there are two stores of rows,
which change places from layer to layer; with one group a chunk is updated in its place.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm.diffusion.engine.forward import keep, sources_of
from vllm.diffusion.memory import DeviceRows, HostRows, chunks
from vllm.diffusion.spans import HeadGroup

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch import Tensor

    from vllm.diffusion.engine.forward import Attending, BodyInputs, Chunked, Samples
    from vllm.diffusion.memory import ActivationPool, HostBuffers, PageStore, Plan, Rows
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.ops import Array


class _Chunks(NamedTuple):
    """What is computed of a layer at a time."""

    attend: list[tuple[slice, tuple[Attending, ...]]]
    feed_forward: list[slice]

    def only(self, rows: Array) -> _Chunks:
        """The chunks that hold some of the rows [R] int64."""

        def has_some(chunk: slice) -> bool:
            return bool(((rows >= chunk.start) & (rows < chunk.stop)).any())

        return _Chunks(
            [item for item in self.attend if has_some(item[0])],
            [chunk for chunk in self.feed_forward if has_some(chunk)],
        )


class StreamedForward:
    """The layers of one step, by groups of heads.

    Args:
        model: the model.
        plan: head groups, chunks, and where the residual stream lies.
        inputs: of the step.
        pool: of the device.
        host: of the host, pinned where there is a GPU.
        caches: kept keys and values.
    """

    def __init__(
        self,
        model: DiffusionModel,
        plan: Plan,
        inputs: BodyInputs,
        pool: ActivationPool,
        host: HostBuffers,
        caches: PageStore,
    ) -> None:
        self._model, self._inputs, self._pool, self._caches = model, inputs, pool, caches
        num_rows = inputs.token_ids.numel()
        self._groups = [HeadGroup(i, plan.head_groups) for i in range(plan.head_groups)]
        names = ["x", "updated x"][: min(plan.head_groups, 2)]
        shape = (num_rows, model.hidden_size)
        stores: list[Rows] = []
        for name in names:
            if plan.host_residual:
                rows = host.take(name, shape, model.dtype)
                stores.append(HostRows(rows, pool, name, inputs.token_ids.device))
            else:
                stores.append(DeviceRows(pool.take(name, shape, model.dtype)))
        self._x, self._updated = stores[0], stores[-1]
        heads = (num_rows, model.num_kv_heads // plan.head_groups, model.head_dim)
        self._k = pool.take("keys", heads, model.dtype)
        self._v = pool.take("values", heads, model.dtype)
        self._seconds = plan.chunk_seconds
        self._writing = list(chunks(num_rows, plan.keys_values_rows))
        self._chunks = _Chunks(
            list(zip(chunks(num_rows, plan.attend_rows), inputs.attending, strict=True)),
            list(chunks(num_rows, plan.feed_forward_rows)),
        )

    def run(self, samples: Iterable[Samples]) -> Chunked[None]:
        """All layers; of the last one the chunks that hold sample rows."""
        yield from self._embed()
        last = len(self._model.layers) - 1
        rows = np.concatenate([np.empty(0, np.int64), *(s.part.rows for s in samples)])
        for index in range(last + 1):
            work = self._chunks if index < last else self._chunks.only(rows)
            if self._inputs.slot_mapping.numel():
                self._caches.turn_to(index)
            for group in self._groups:
                yield from self._keys_values(index, group)
                yield from self._attend(index, group, work)
            self._x, self._updated = self._updated, self._x
            yield from self._feed_forward(index, work)

    def sample_rows(self, samples: Iterable[Samples]) -> Generator[Tensor]:
        """After `run`, the sample rows part by part: [r, D]."""
        for part, rows, *_ in samples:
            with self._pool.scope("sample rows"):
                shape = (len(part.rows), self._model.hidden_size)
                x = self._pool.take("sample rows", shape, self._model.dtype)
                self._x.select(rows, part.rows, x)
                yield x

    def _embed(self) -> Chunked[None]:
        ids, parts = self._inputs.token_ids, self._chunks.feed_forward
        visiting = self._x.visit(parts, reads=False, writes=True)
        with self._pool.scope("embed"), closing(visiting) as visits:
            for rows, x in zip(parts, visits, strict=True):
                yield 0.0
                self._model.embed(ids[rows], x)

    def _keys_values(self, index: int, group: HeadGroup) -> Chunked[None]:
        layer, pool, positions = self._model.layers[index], self._pool, self._inputs.positions
        with pool.scope("keys-values"), closing(self._x.visit(self._writing)) as visits:
            for rows, x in zip(self._writing, visits, strict=True):
                yield self._seconds.keys_values
                with pool.scope("keys-values"):
                    rotary = self._model.rotary(positions[rows], pool)
                    k, v = self._k[rows], self._v[rows]
                    layer.attention.keys_values_of(group, x, rotary, k, v, pool)
        heads = group.part(self._model.num_kv_heads)
        keep(self._k, self._v, index, self._inputs.slot_mapping, self._caches, heads)

    def _attend(self, index: int, group: HeadGroup, work: _Chunks) -> Chunked[None]:
        layer, pool, positions = self._model.layers[index], self._pool, self._inputs.positions
        heads = group.part(self._model.num_kv_heads)
        visiting = self._visit_both([rows for rows, _ in work.attend], is_first=group.index == 0)
        with pool.scope("attend"), closing(visiting) as visits:
            for (rows, spans), (x, updated) in zip(work.attend, visits, strict=True):
                yield self._seconds.attend
                with pool.scope("attend"):
                    rotary = self._model.rotary(positions[rows], pool)
                    sources = sources_of(spans, self._k, self._v, index, self._caches, heads)
                    layer.attention.attend_of(group, x, rotary, sources, updated, pool)

    def _visit_both(
        self, ranges: list[slice], *, is_first: bool
    ) -> Generator[tuple[Tensor, Tensor]]:
        """Chunks as they were before the layer, and as they are with the groups so far."""
        if self._x is self._updated:
            with closing(self._x.visit(ranges, writes=True)) as visits:
                for x in visits:
                    yield x, x
            return
        targets = self._updated.visit(ranges, reads=not is_first, writes=True)
        with closing(self._x.visit(ranges)) as visits, closing(targets):
            for x, updated in zip(visits, targets, strict=True):
                if is_first:
                    updated.copy_(x)
                yield x, updated

    def _feed_forward(self, index: int, work: _Chunks) -> Chunked[None]:
        visiting = self._x.visit(work.feed_forward, writes=True)
        with self._pool.scope("feed-forward"), closing(visiting) as visits:
            for x in visits:
                yield self._seconds.feed_forward
                self._model.layers[index].feed_forward(x, self._pool)

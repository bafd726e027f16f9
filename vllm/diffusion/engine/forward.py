# SPDX-License-Identifier: Apache-2.0
"""One forward of a packed batch: layers x stages x chunks.

Only attention mixes rows, so every other stage may run on any chunk of rows. The residual stream
and one layer's keys and values are all that lives from stage to stage; requests with a cache keep
the keys and values of every layer.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.layers.attention import Span
from vllm.diffusion.memory import BufferPool, Plan, chunks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from vllm.diffusion.engine.batch import StepBatch
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.diffusion.models.base import DiffusionModel


class _Region(NamedTuple):
    """Rows of the batch whose keys and values lie in the same buffers.

    Attributes:
        rows: rows of the batch.
        k, v: [L, N, KV, hd]; the same memory for every layer where nothing is kept.
        written: rows of k and v that belong to `rows`, in order.
        sequences: the region's sequences as pairs of ranges: rows counted from the region's
            first, and rows of k and v that they attend to.
    """

    rows: slice
    k: torch.Tensor
    v: torch.Tensor
    written: slice
    sequences: tuple[tuple[slice, slice], ...]


def forward(
    model: DiffusionModel, batch: StepBatch, plan: Plan, buffers: BufferPool
) -> torch.Tensor:
    """Residual stream [T, D] after the last layer; it is a buffer of `buffers`."""
    rows, dtype = batch.num_rows, model.dtype
    heads = (rows, model.num_heads, model.head_dim)
    x = model.embed(batch.token_ids, buffers.take("x", (rows, model.hidden_size), dtype))
    q = buffers.take("q", heads, dtype) if plan.keep_queries else None
    rotary = model.rotary(batch.positions)

    def rows_of(on: slice) -> tuple[torch.Tensor, Rotary, torch.Tensor | None]:
        return x[on], rotary.rows(on.start, on.stop), None if q is None else q[on]

    # What a chunk is does not depend on the layer, so it is worked out once.
    regions = [
        (
            region,
            [(part, *rows_of(on)) for part, on in _chunks(region.rows, plan.keys_values_rows)],
            [
                (_spans(region.sequences, part), *rows_of(on))
                for part, on in _chunks(region.rows, plan.attend_rows)
            ],
        )
        for region in _regions(model, batch, buffers)
    ]
    feed_forward_chunks = [x[part] for part in chunks(rows, plan.feed_forward_rows)]
    for index, layer in enumerate(model.layers):
        for region, writing, attending in regions:
            k, v = region.k[index], region.v[index]
            own_k, own_v = k[region.written], v[region.written]
            for part, x_rows, angles, queries in writing:
                layer.keys_values(x_rows, angles, own_k[part], own_v[part], queries)
            for spans, x_rows, angles, queries in attending:
                layer.attend(x_rows, angles, k, v, spans, queries)
        for x_rows in feed_forward_chunks:
            layer.feed_forward(x_rows)
    return x


def _regions(model: DiffusionModel, batch: StepBatch, buffers: BufferPool) -> Iterator[_Region]:
    packed = batch.boundaries[-1]
    if packed:
        shape = (packed, model.num_kv_heads, model.head_dim)
        k, v = (buffers.take(name, shape, model.dtype) for name in ("k", "v"))
        sequences = tuple(slice(*ends) for ends in itertools.pairwise(batch.boundaries))
        yield _Region(
            rows=slice(0, packed),
            k=k.expand(len(model.layers), *shape),
            v=v.expand(len(model.layers), *shape),
            written=slice(0, packed),
            sequences=tuple((rows, rows) for rows in sequences),
        )
    for rows, positions, cache in batch.windows:
        own = slice(0, rows.stop - rows.start)
        everything = slice(0, cache.k.shape[1])
        yield _Region(rows, cache.k, cache.v, positions, ((own, everything),))


def _chunks(rows: slice, rows_per_chunk: int) -> Iterator[tuple[slice, slice]]:
    """Chunks of a range of rows: counted from its start, and as rows of the batch."""
    for part in chunks(rows.stop - rows.start, rows_per_chunk):
        yield part, slice(part.start + rows.start, part.stop + rows.start)


def _spans(sequences: tuple[tuple[slice, slice], ...], part: slice) -> tuple[Span, ...]:
    """The queries of each sequence in a chunk of rows, with all keys of that sequence."""
    found = []
    for own, keys in sequences:
        first, last = max(own.start, part.start), min(own.stop, part.stop)
        if first < last:
            found.append(Span(first - part.start, last - part.start, keys.start, keys.stop))
    return tuple(found)

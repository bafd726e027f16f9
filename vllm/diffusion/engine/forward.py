# SPDX-License-Identifier: Apache-2.0
"""One forward of a packed batch: layers x stages x chunks.

Only attention mixes rows, so every other stage may run on any chunk of rows. The residual stream
and one layer's keys and values are all that lives from stage to stage; requests with a cache keep
the keys and values of every layer. Of the last layer all rows have keys and values, but only the
rows that are read get the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.memory import chunks
from vllm.diffusion.spans import AttentionLayout, KeySource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from vllm.diffusion.buffers import Buffers
    from vllm.diffusion.engine.batch import ReadPart, SpanGroup, StepBatch
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.diffusion.memory import CachePool, Plan
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import RowGroup

_ALL = slice(None)


class Attending(NamedTuple):
    """Rows of a chunk and where their keys are, on the device.

    Attributes:
        rows: of the chunk.
        layout: of these rows.
        is_cached: the keys lie in the pool of kept ones.
    """

    rows: slice
    layout: AttentionLayout
    is_cached: bool


class BodyInputs(NamedTuple):
    """What the layers want to know of a batch, on the device.

    Attributes:
        token_ids, positions: [T] int64.
        slots: [W] int64, the pool's row of each of the last W rows; negative for none.
        attending: for every chunk of the attend stage, what its rows read.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attending: tuple[tuple[Attending, ...], ...]


class BodyOutputs(NamedTuple):
    """What the rows that are read need of all rows.

    Attributes:
        x: [T, D], the residual stream before the last layer.
        positions: [T] int64.
        rotary: of all rows, where that is kept.
        k, v: [T, KV, hd], the last layer's keys and values of this step's rows.
    """

    x: Tensor
    positions: Tensor
    rotary: Rotary | None
    k: Tensor
    v: Tensor


class ReadInputs(NamedTuple):
    """A part of the rows that are read, on the device.

    Attributes:
        part: the same on the host.
        rows: [r] int64, of the batch.
        positions: [r] int64, on the canvas.
        attending: what the rows read.
    """

    part: ReadPart
    rows: Tensor
    positions: Tensor
    attending: tuple[Attending, ...]


def upload(
    batch: StepBatch, plan: Plan, parts: Sequence[ReadPart], device: torch.device
) -> tuple[BodyInputs, list[ReadInputs]]:
    """All that the device must be told of a step, in one copy."""
    attend_chunks = [batch.span_groups(rows) for rows in chunks(batch.num_rows, plan.attend_rows)]
    arrays = [batch.token_ids, batch.positions, batch.slots]
    arrays += [a for groups in attend_chunks for a in _layout_arrays(groups)]
    found = iter(ops.to_device([*arrays, *_read_arrays(parts)], device))
    body = BodyInputs(
        next(found), next(found), next(found), tuple(_attending(g, found) for g in attend_chunks)
    )
    return body, _read_inputs(parts, found)


def upload_reads(parts: Sequence[ReadPart], device: torch.device) -> list[ReadInputs]:
    """What the device must be told of the rows that are read, where a graph knows the rest."""
    return _read_inputs(parts, iter(ops.to_device(_read_arrays(parts), device)))


def run_body(
    model: DiffusionModel,
    inputs: BodyInputs,
    plan: Plan,
    residents: Buffers,
    scratch: Buffers,
    caches: CachePool,
) -> BodyOutputs:
    """All layers of all rows, but for what follows the keys and values of the last one.

    What stays from stage to stage is taken from `residents`, what a stage needs from `scratch`.
    """
    num_rows, dtype = inputs.token_ids.numel(), model.dtype
    x = model.embed(inputs.token_ids, residents.take("x", (num_rows, model.hidden_size), dtype))
    rotary = model.rotary(inputs.positions, residents) if plan.keep_queries else None
    kv_width = 2 * model.num_kv_heads * model.head_dim
    q_width = model.num_heads * model.head_dim if plan.keep_queries else 0
    product = residents.take("qkv", (num_rows, q_width + kv_width), dtype)
    # What a chunk is does not depend on the layer, so it is worked out once.
    writing = list(chunks(num_rows, plan.keys_values_rows))
    attending = list(zip(chunks(num_rows, plan.attend_rows), inputs.attending, strict=True))
    feeding = list(chunks(num_rows, plan.feed_forward_rows))
    *before_last, last = model.layers

    def tables(rows: slice) -> Rotary:
        if rotary is not None:
            return rotary.rows(rows)
        return model.rotary(inputs.positions[rows], scratch)

    def keys_values(index: int, product: Tensor) -> None:
        for rows in writing:
            with scratch.scope("keys-values"):
                model.layers[index].keys_values(x[rows], tables(rows), product[rows], scratch)
        _, k, v = model.layers[index].attention.split(product)
        keep(k, v, index, inputs.slots, caches)

    for index, layer in enumerate(before_last):
        keys_values(index, product)
        q, k, v = layer.attention.split(product)
        for rows, groups in attending:
            with scratch.scope("attend"):
                sources = sources_of(groups, k, v, index, caches)
                queries = None if q is None else q[rows]
                layer.attend(x[rows], tables(rows), sources, queries, scratch)
        for rows in feeding:
            layer.feed_forward(x[rows], scratch)
    product = residents.take("qkv", (num_rows, kv_width), dtype)
    keys_values(len(before_last), product)
    _, k, v = last.attention.split(product)
    return BodyOutputs(x, inputs.positions, rotary, k, v)


def read_last_layer(
    model: DiffusionModel,
    batch: StepBatch,
    body: BodyOutputs,
    reads: Iterable[ReadInputs],
    scratch: Buffers,
    caches: CachePool,
) -> Iterator[tuple[Tensor, tuple[RowGroup, ...]]]:
    """The last layer of the rows that are read, part by part: [r, D], and how to sample them."""
    index = len(model.layers) - 1
    layer = model.layers[index]
    for part, rows, positions, attending in reads:
        with scratch.scope("read"):
            x = scratch.take("read rows", (rows.numel(), model.hidden_size), model.dtype)
            torch.index_select(body.x, 0, rows, out=x)
            if body.rotary is None:
                rotary = model.rotary(body.positions.index_select(0, rows), scratch)
            else:
                rotary = body.rotary.select(rows, scratch)
            sources = sources_of(attending, body.k, body.v, index, caches)
            layer.attend(x, rotary, sources, None, scratch)
            layer.feed_forward(x, scratch)
            yield x, batch.row_groups(part, positions)


def keep(
    k: Tensor, v: Tensor, index: int, slots: Tensor, caches: CachePool, heads: slice = _ALL
) -> None:
    """Store a layer's keys and values of the rows that have slots; these are the last rows.

    Args:
        k, v: [T, heads, hd].
        index: of the layer.
        slots: as `BodyInputs` has them.
        caches: where they go.
        heads: which key/value heads these are.
    """
    num_kept = slots.numel()
    if num_kept:
        key_cache, value_cache = caches.keys(index)[:, heads], caches.values(index)[:, heads]
        ops.store_keys_values(k[-num_kept:], v[-num_kept:], key_cache, value_cache, slots)


def sources_of(
    attending: Iterable[Attending],
    k: Tensor,
    v: Tensor,
    index: int,
    caches: CachePool,
    heads: slice = _ALL,
) -> list[KeySource]:
    """Where the rows of a chunk find their keys and values; arguments as for `keep`."""
    return [
        KeySource(rows, caches.keys(index)[:, heads], caches.values(index)[:, heads], layout)
        if is_cached
        else KeySource(rows, k, v, layout)
        for rows, layout, is_cached in attending
    ]


def _read_arrays(parts: Iterable[ReadPart]) -> list[Array]:
    """The host arrays that `_read_inputs` wants on the device, in order."""
    return [
        array
        for part in parts
        for array in (part.rows, part.positions, *_layout_arrays(part.span_groups))
    ]


def _read_inputs(parts: Iterable[ReadPart], found: Iterator[Tensor]) -> list[ReadInputs]:
    """The parts with their arrays on the device, taken from `found`."""
    return [
        ReadInputs(part, next(found), next(found), _attending(part.span_groups, found))
        for part in parts
    ]


def _layout_arrays(groups: Iterable[SpanGroup]) -> list[Array]:
    """Query ends, key starts and key counts of every group."""
    arrays = []
    for group in groups:
        columns = list(zip(*group.spans, strict=True))
        _, query_ends, key_starts, key_ends = columns
        counts = [end - start for start, end in zip(key_starts, key_ends, strict=True)]
        for values in ((0, *query_ends), (*key_starts, key_ends[-1]), counts):
            arrays.append(np.array(values, dtype=np.int32))
    return arrays


def _attending(groups: Iterable[SpanGroup], found: Iterator[Tensor]) -> tuple[Attending, ...]:
    """The groups with their arrays on the device, taken from `found`."""
    return tuple(
        Attending(
            group.rows,
            AttentionLayout(
                query_ends=next(found),
                key_starts=next(found),
                key_counts=next(found),
                max_queries=max(span.q_end - span.q_start for span in group.spans),
                max_keys=max(span.kv_end - span.kv_start for span in group.spans),
                spans=group.spans,
            ),
            group.is_cached,
        )
        for group in groups
    )

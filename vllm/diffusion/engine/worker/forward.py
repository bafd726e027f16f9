# SPDX-License-Identifier: Apache-2.0
"""One forward of a packed batch: layers x stages x chunks.

Only attention mixes rows, so every other stage may run on any chunk of rows. The residual stream
and one layer's keys and values are all that lives from stage to stage; requests with a cache keep
the keys and values of every layer. Of the last layer all rows have keys and values, but only the
sample rows get the rest.

The layers are a generator that stops before every chunk, so that whoever runs it may do something
else in between; what it yields is the time that the plan predicts for the chunk.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch

from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.core.spans import AttentionLayout, KeySource, KeyTarget
from vllm.diffusion.engine.worker.inputs import layout_of, pack, pack_samples
from vllm.diffusion.memory import chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from vllm.diffusion.core.buffers import Buffers
    from vllm.diffusion.core.spans import PageTable
    from vllm.diffusion.engine.worker.batch import SpanGroup, StepBatch
    from vllm.diffusion.engine.worker.inputs import SampleInputs, SequenceBounds, StepInputs
    from vllm.diffusion.engine.worker.row_shares import Cuts, Round
    from vllm.diffusion.engine.worker.sample_rows import SamplePart
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.diffusion.memory import PageStore, Plan
    from vllm.diffusion.models.base import DiffusionModel

_ALL = slice(None)

T = TypeVar("T")
# Work that stops before every chunk and says what the plan predicts for it, in seconds.
Chunked: TypeAlias = Generator[float, None, T]


class Attending(NamedTuple):
    """Rows of a chunk and the location of their keys, on the device.

    Attributes:
        rows: rows of the chunk.
        layout: which keys these rows read.
        is_cached: the keys lie in the store.
    """

    rows: slice
    layout: AttentionLayout
    is_cached: bool


class BodyInputs(NamedTuple):
    """Inputs of the layers, on the device.

    Attributes:
        token_ids, positions: [T] int64.
        slot_mapping: [W] int64, the store's row of each of the last W rows; negative for none.
        attending: for every chunk of the attend stage, the keys that its rows attend to; then for
            the chunks of the last layer, where these differ.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attending: tuple[tuple[Attending, ...], ...]


class BodyOutputs(NamedTuple):
    """Results of the layers that the sample rows need.

    Attributes:
        x: [T, D], the residual stream before the last layer, or after it where all of it ran.
        positions: [T] int64.
        rotary: rotary tables of all rows, where they are kept.
        keys_values: [T, KV, hd] each, of the last layer; None where all of it ran.
    """

    x: Tensor
    positions: Tensor
    rotary: Rotary | None
    keys_values: tuple[Tensor, Tensor] | None


class DevicePart(NamedTuple):
    """A part of the sample rows, on the device.

    Attributes:
        part: its description on the host.
        rows: [r] int64, rows of the batch.
        positions: [r] int64, relative to the canvas.
        attending: keys that the rows attend to.
    """

    part: SamplePart
    rows: Tensor
    positions: Tensor
    attending: tuple[Attending, ...]


def run_to_end(work: Chunked[T]) -> T:
    """Run all chunks and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def upload(
    batch: StepBatch, plan: Plan, parts: Sequence[SamplePart], caches: PageStore
) -> tuple[BodyInputs, list[DevicePart]]:
    """Copy all inputs of a step to the device, in one transfer."""
    groups = [batch.span_groups(rows) for rows in chunks(batch.num_rows, plan.rows.attend)]
    packed = pack(batch, groups), tuple(map(pack_samples, parts))
    inputs, samples = ops.to_device(packed, caches.device)
    return _body_inputs(groups, inputs, caches), _samples(parts, samples, caches.table)


def upload_share(
    batch: StepBatch, cuts: Cuts, rows: slice, rounds: Sequence[Round], caches: PageStore
) -> tuple[BodyInputs, tuple[tuple[Tensor, Tensor], ...]]:
    """Copy the inputs of a streamed forward to the device, where this rank has the rows `rows`.

    Also returns, for every round of sample rows: the rows [g] int64 of this rank's share that the
    parts of all ranks need, and the canvas positions [r] int64 of this rank's part.
    """
    chunks = (*cuts.attend, *cuts.last_attend)
    groups = [batch.span_groups(*chunk.places) for chunk in chunks]
    packed = pack(batch, groups, rows), tuple((r.given, r.positions) for r in rounds)
    inputs, samples = ops.to_device(packed, caches.device)
    return _body_inputs(groups, inputs, caches), samples


def upload_samples(parts: Sequence[SamplePart], caches: PageStore) -> list[DevicePart]:
    """Copy the inputs of the sample rows to the device, where a graph has the rest."""
    inputs = ops.to_device(tuple(map(pack_samples, parts)), caches.device)
    return _samples(parts, inputs, caches.table)


def run_body(
    model: DiffusionModel,
    inputs: BodyInputs,
    plan: Plan,
    residents: Buffers,
    scratch: Buffers,
    caches: PageStore,
    *,
    to_the_end: bool = False,
) -> Chunked[BodyOutputs]:
    """Run all layers on all rows, except what follows the keys and values of the last one.

    What lives from stage to stage is taken from `residents`, what one stage needs from `scratch`.
    With `to_the_end` the last layer runs like the others.
    """
    num_rows, last = inputs.token_ids.numel(), len(model.layers) - 1
    (listed,) = stages.residual(model.dtype, model.hidden_size)
    x = model.embed(inputs.token_ids, listed.take(residents, num_rows))
    rotary = model.rotary(inputs.positions, residents) if plan.layout.keep_queries else None

    num_heads = model.num_heads if plan.layout.keep_queries else 0
    product = _projections(model, num_heads, num_rows, residents)
    # What a chunk is does not depend on the layer, so it is worked out once.
    writing = list(chunks(num_rows, plan.rows.keys_values))
    attending = list(zip(chunks(num_rows, plan.rows.attend), inputs.attending, strict=True))
    feeding = list(chunks(num_rows, plan.rows.feed_forward))
    seconds = plan.chunk_seconds

    def tables(rows: slice) -> Rotary:
        own = inputs.positions[rows]
        return model.rotary(own, scratch) if rotary is None else rotary.rows(rows)

    def keys_values(index: int, product: Tensor) -> Chunked[None]:
        layer = model.layers[index]
        if inputs.slot_mapping.numel():
            caches.turn_to(index)
        for rows in writing:
            yield seconds.keys_values
            target = _target_of(rows, num_rows, index, inputs.slot_mapping, caches)
            with scratch.scope("keys-values"):
                layer.attention.keys_values(x[rows], tables(rows), product[rows], scratch, target)

    for index, layer in enumerate(islice(model.layers, last + to_the_end)):
        yield from keys_values(index, product)
        q, k, v = layer.attention.split(product)
        for rows, groups in attending:
            yield seconds.attend
            with scratch.scope("attend"):
                sources = sources_of(groups, k, v, index, caches)
                queries = None if q is None else q[rows]
                layer.attention.attend(x[rows], tables(rows), sources, queries, scratch)
        for rows in feeding:
            yield seconds.feed_forward
            layer.mlp_stage.feed_forward(x[rows], scratch)
    if to_the_end:
        return BodyOutputs(x, inputs.positions, rotary, None)
    product = _projections(model, 0, num_rows, residents)
    yield from keys_values(last, product)
    _, k, v = model.layers[last].attention.split(product)
    return BodyOutputs(x, inputs.positions, rotary, (k, v))


def run_last_layer(
    model: DiffusionModel,
    body: BodyOutputs,
    samples: Iterable[DevicePart],
    scratch: Buffers,
    caches: PageStore,
) -> Generator[Tensor]:
    """Run the rest of the last layer on the sample rows alone, yielding [r, D] part by part.

    A yielded tensor is valid until the next one is asked for.
    """
    index = len(model.layers) - 1
    layer = model.layers[index]
    for _, rows, _, attending in samples:
        with scratch.scope("sample rows"):
            listed, _ = stages.read_rows(model.dtype, model.hidden_size)
            x = listed.take(scratch, rows.numel())
            torch.index_select(body.x, 0, rows, out=x)
            if body.keys_values is None:
                yield x
                continue
            if body.rotary is None:
                rotary = model.rotary(body.positions.index_select(0, rows), scratch)
            else:
                rotary = body.rotary.select(rows, scratch)
            sources = sources_of(attending, *body.keys_values, index, caches)
            layer.attention.attend(x, rotary, sources, None, scratch)
            layer.mlp_stage.feed_forward(x, scratch)
            yield x


def _projections(
    model: DiffusionModel, num_heads: int, num_rows: int, residents: Buffers
) -> Tensor:
    """Take room for a layer's keys and values of all rows, and for so many heads of queries."""
    listed = stages.fused_heads(model.dtype, num_heads, model.num_kv_heads, model.head_dim)
    return listed.take(residents, num_rows)


def _target_of(
    rows: slice, num_rows: int, index: int, slot_mapping: Tensor, caches: PageStore
) -> KeyTarget | None:
    """Return where a layer's keys and values of a chunk are stored, or None.

    Arguments are as for `keep`.
    """
    first = num_rows - slot_mapping.numel()
    slots = slot_mapping[max(rows.start - first, 0) : max(rows.stop - first, 0)]
    return KeyTarget(caches.keys(index), caches.values(index), slots) if slots.numel() else None


def keep(
    k: Tensor, v: Tensor, index: int, slot_mapping: Tensor, caches: PageStore, heads: slice = _ALL
) -> None:
    """Store a layer's keys and values of the rows that have slots, which are the last rows.

    Args:
        k, v: [T, heads, hd].
        index: index of the layer.
        slot_mapping: slots, as in `BodyInputs`.
        caches: the store.
        heads: the key/value heads in `k` and `v`.
    """
    num_kept = slot_mapping.numel()
    if num_kept:
        key_cache, value_cache = caches.keys(index)[:, heads], caches.values(index)[:, heads]
        ops.store_keys_values(k[-num_kept:], v[-num_kept:], key_cache, value_cache, slot_mapping)


def sources_of(
    attending: Iterable[Attending],
    k: Tensor,
    v: Tensor,
    index: int,
    caches: PageStore,
    heads: slice = _ALL,
) -> list[KeySource]:
    """Return where the rows of a chunk find their keys and values; arguments as for `keep`."""
    return [
        KeySource(rows, caches.keys(index)[:, heads], caches.values(index)[:, heads], layout)
        if is_cached
        else KeySource(rows, k, v, layout)
        for rows, layout, is_cached in attending
    ]


def _body_inputs(
    groups: Sequence[Sequence[SpanGroup]], inputs: StepInputs[Tensor], caches: PageStore
) -> BodyInputs:
    """Make the layers' inputs from the span groups of every chunk of the attend stage."""
    attending = tuple(
        _attending(own, bounds, caches.table)
        for own, bounds in zip(groups, inputs.bounds, strict=True)
    )
    return BodyInputs(inputs.token_ids, inputs.positions, inputs.slot_mapping, attending)


def _samples(
    parts: Iterable[SamplePart], inputs: Iterable[SampleInputs[Tensor]], pages: PageTable
) -> list[DevicePart]:
    """Pair the parts of the sample rows with their inputs on the device."""
    return [
        DevicePart(part, own.rows, own.positions, _attending(part.span_groups, own.bounds, pages))
        for part, own in zip(parts, inputs, strict=True)
    ]


def _attending(
    groups: Sequence[SpanGroup], bounds: Sequence[SequenceBounds[Tensor]], pages: PageTable
) -> tuple[Attending, ...]:
    """Pair span groups with their bounds on the device."""
    return tuple(
        Attending(group.rows, layout_of(group, on_device, pages), group.is_cached)
        for group, on_device in zip(groups, bounds, strict=True)
    )

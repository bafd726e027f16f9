# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a packed batch: layers x stages x chunks, then samples of its sample rows.

Only attention mixes rows, so every other stage may run on any chunk of rows. Only the residual
stream and one layer's keys and values stay in memory from stage to stage; requests with a cache
keep the keys and values of every layer. In the last layer all rows compute keys and values, but
only the sample rows run the remaining stages. If the model routes rows to experts by windows, all
rows run all stages.

The layers are a generator that stops before every chunk, so that its caller may do other work in
between. It yields the time in seconds that the plan predicts for the chunk.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch

from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.core.spans import KeySource, KeyTarget
from vllm.diffusion.memory import chunks
from vllm.diffusion.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout
    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.engine.worker.batch import StepBatch, StepInputs
    from vllm.diffusion.engine.worker.sample_rows import SamplePart, SampleRows
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.diffusion.memory import ActivationPool, PageStore, Plan
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.ops import Array
    from vllm.diffusion.parallel.groups import Ranks

T = TypeVar("T")
# Work that stops before every chunk and yields the predicted seconds of the chunk.
Chunked: TypeAlias = Generator[float, None, T]


class BodyOutputs(NamedTuple):
    """Results of the layers, as input of the last layer's sample rows.

    Attributes:
        x: [T, D], the residual stream before the last layer, or after it if the last layer ran on
            all rows.
        positions: [T] int64.
        rotary: rotary tables of all rows; None if they are not kept.
        keys_values: [T, KV, hd] each, of the last layer; None if the last layer ran on all rows.
        marks: tensors with an entry per row, for the feed-forward stage.
    """

    x: Tensor
    positions: Tensor
    rotary: Rotary | None
    keys_values: tuple[Tensor, Tensor] | None
    marks: tuple[Tensor, ...] = ()


class ForwardPass:
    """Computes steps: from a packed batch to the table of its samples.

    Attributes:
        note_first: receives a part of a step and its hidden states [r, D], which other requests may
            need; None if no request shares its prompt.
    """

    def __init__(
        self, model: DiffusionModel, pool: ActivationPool, caches: PageStore, ranks: Ranks
    ) -> None:
        self.model, self.pool, self.caches, self.ranks = model, pool, caches, ranks
        self.note_first: Callable[[StepBatch, SamplePart[Array], Tensor], None] | None = None

    def run(self, rows: SampleRows, plan: Plan, body: BodyOutputs | None = None) -> Chunked[Tensor]:
        """Compute a step chunk by chunk and return the table of its samples.

        `body` has the layers' results if a graph has computed them.
        """
        # The host builds the parts while the graph runs.
        batch, parts = rows.batch, tuple(rows.parts(plan.rows.logits))
        pool, model, caches = self.pool, self.model, self.caches
        with pool.scope("step"):
            stages.INPUTS.expect(pool, batch.num_rows)
            stages.RESULTS.expect(pool, batch.shape.sample_rows)
            if body is not None:
                samples = ops.to_device(parts, caches.device)
            else:
                attend_chunks = [[chunk] for chunk in chunks(batch.num_rows, plan.rows.attend)]
                host_inputs = batch.inputs(attend_chunks), parts
                inputs, samples = ops.to_device(host_inputs, caches.device)
                if batch.slot_mapping.size:
                    caches.begin_step(batch.slot_mapping, reads=batch.reads_kept)
                body = yield from run_body(
                    *(model, inputs, plan, pool, pool, caches),
                    to_the_end=model.routes_windows,
                )
            sampled = []
            with closing(run_last_layer(model, body, samples, pool, caches)) as hidden:
                for part, on_device in zip(parts, samples, strict=True):
                    yield plan.chunk_seconds.logits
                    sample_rows = next(hidden)
                    if self.note_first is not None:
                        self.note_first(batch, part, sample_rows)
                    sampled.append(self.sampled(rows, part, on_device.positions, sample_rows))
            if batch.slot_mapping.size:
                caches.end_step()
            return self.broadcast_samples(rows.choose_jointly(Samples.joined(sampled)))

    def sampled(
        self, rows: SampleRows, part: SamplePart[Array], positions: Tensor, hidden: Tensor
    ) -> Samples[Tensor]:
        """Sample a part, given its `positions` [r] and `hidden` states [r, D] on the device."""
        return sample(self.model, hidden, rows.row_groups(part, positions), self.pool)

    def broadcast_samples(self, samples: Samples[Tensor]) -> Tensor:
        """Return the samples table of rank 0 on every rank, so that all commit the same tokens.

        All ranks must have computed the step.
        """
        table: Tensor = samples.table
        if self.ranks.sequence.size == 1 or not table.numel():
            return table
        return self.ranks.sequence.broadcast(table.contiguous())


def run_to_end(work: Chunked[T]) -> T:
    """Run all chunks and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def run_body(
    model: DiffusionModel,
    inputs: StepInputs[Tensor],
    plan: Plan,
    residents: Buffers,
    scratch: Buffers,
    caches: PageStore,
    *,
    to_the_end: bool = False,
) -> Chunked[BodyOutputs]:
    """Run all layers on all rows, except the stages after the keys and values of the last layer.

    `residents` holds buffers that live from stage to stage, `scratch` buffers of a single stage.
    With `to_the_end` the last layer runs all its stages, too.
    """
    num_rows, last = inputs.token_ids.numel(), len(model.layers) - 1
    (buffer,) = stages.residual(model.dtype, model.hidden_size)
    whole = model.embed(inputs.token_ids, buffer.take(residents, num_rows))
    marks = model.condition(whole, inputs.is_block)
    x = whole if model.adapting is None else model.adapting.watch(whole)
    rotary = model.rotary(inputs.positions, residents) if plan.layout.keep_queries else None
    num_heads = model.num_heads if plan.layout.keep_queries else 0
    product = _projections(model, num_heads, num_rows, residents)
    writing = list(chunks(num_rows, plan.rows.keys_values))
    attending = list(zip(chunks(num_rows, plan.rows.attend), inputs.layouts, strict=True))
    feeding = list(chunks(num_rows, plan.rows.feed_forward))
    seconds = plan.chunk_seconds

    def tables(rows: slice) -> Rotary:
        return rotary.rows(rows) if rotary else model.rotary(inputs.positions[rows], scratch)

    def keys_values(index: int, product: Tensor) -> Chunked[None]:
        layer = model.layers[index]
        if inputs.slot_mapping.numel():
            caches.turn_to(index)
        for rows in writing:
            yield seconds.keys_values
            target = target_of(rows, num_rows, index, inputs, caches)
            with scratch.scope("keys-values"):
                layer.attention.keys_values(x[rows], tables(rows), product[rows], scratch, target)

    for index, layer in enumerate(islice(model.layers, last + to_the_end)):
        yield from keys_values(index, product)
        q, k, v = layer.attention.split(product)
        for rows, layouts in attending:
            yield seconds.attend
            with scratch.scope("attend"):
                sources = sources_of(layouts, k, v, index, caches)
                queries = None if q is None else q[rows]
                layer.attention.attend(x[rows], tables(rows), sources, queries, scratch)
        for rows in feeding:
            yield seconds.feed_forward
            layer.mlp_stage.feed_forward(x[rows], scratch, *[mark[rows] for mark in marks])
    if to_the_end:
        return BodyOutputs(whole, inputs.positions, rotary, None)
    product = _projections(model, 0, num_rows, residents)
    yield from keys_values(last, product)
    _, k, v = model.layers[last].attention.split(product)
    return BodyOutputs(whole, inputs.positions, rotary, (k, v), marks)


def run_last_layer(
    model: DiffusionModel,
    body: BodyOutputs,
    parts: Iterable[SamplePart[Tensor]],
    scratch: Buffers,
    caches: PageStore,
) -> Generator[Tensor]:
    """Run the remaining stages of the last layer on the sample rows, yielding [r, D] per part.

    A yielded tensor is valid until the next one is requested.
    """
    index = len(model.layers) - 1
    layer = model.layers[index]
    if model.adapting is not None:
        parts = model.adapting.of_parts(parts)
    for rows, _, layouts, *_ in parts:
        with scratch.scope("sample rows"):
            buffer, _ = stages.read_rows(model.dtype, model.hidden_size)
            x = buffer.take(scratch, rows.numel())
            torch.index_select(body.x, 0, rows, out=x)
            if body.keys_values is None:
                yield x
                continue
            if body.rotary is None:
                rotary = model.rotary(body.positions.index_select(0, rows), scratch)
            else:
                rotary = body.rotary.select(rows, scratch)
            sources = sources_of(layouts, *body.keys_values, index, caches)
            layer.attention.attend(x, rotary, sources, None, scratch)
            marks = [mark.index_select(0, rows) for mark in body.marks]
            layer.mlp_stage.feed_forward(x, scratch, *marks)
            yield x


def _projections(
    model: DiffusionModel, num_heads: int, num_rows: int, residents: Buffers
) -> Tensor:
    """Allocate a layer's keys and values of all rows, with `num_heads` query heads."""
    buffer = stages.fused_heads(model.dtype, num_heads, model.num_kv_heads, model.head_dim)
    return buffer.take(residents, num_rows)


def target_of(
    rows: slice, num_rows: int, index: int, inputs: StepInputs[Tensor], caches: PageStore
) -> KeyTarget | None:
    """Return where a layer stores the keys and values of a chunk, or None."""
    slot_mapping = inputs.slot_mapping
    if caches.has_window(index) and inputs.window_slots is not None:
        slot_mapping = inputs.window_slots
    first = num_rows - slot_mapping.numel()
    of_chunk = slice(max(rows.start - first, 0), max(rows.stop - first, 0))
    slots = slot_mapping[of_chunk]
    copies = None if inputs.copy_slots is None else inputs.copy_slots[:, of_chunk]
    return (
        KeyTarget(caches.keys(index), caches.values(index), slots, copies) if len(slots) else None
    )


def sources_of(
    layouts: Iterable[AttentionLayout[Tensor]],
    k: Tensor,
    v: Tensor,
    index: int,
    caches: PageStore,
    heads: slice = slice(None),
) -> list[KeySource]:
    """Return the sources of the keys and values that the rows of a chunk read in a layer.

    `k` and `v` [T, heads, hd] are keys and values of this step, of the key/value heads `heads`.
    """
    sources = []
    for layout in layouts:
        if layout.pages is None:
            sources.append(KeySource(k, v, layout))
            continue
        if caches.has_window(index):
            layout = layout._replace(pages=layout.pages.of_window)
        kept = caches.keys(index)[:, heads], caches.values(index)[:, heads]
        sources.append(KeySource(*kept, layout))
    return sources

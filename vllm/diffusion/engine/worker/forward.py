# SPDX-License-Identifier: Apache-2.0
"""One forward of a packed batch: layers x stages x chunks, then the samples of its sample rows.

Only attention mixes rows, so every other stage may run on any chunk of rows. The residual stream
and one layer's keys and values are all that lives from stage to stage; requests with a cache keep
the keys and values of every layer. Of the last layer all rows have keys and values, but only the
sample rows get the rest; where rows choose their experts by windows, all do.

The layers are a generator that stops before every chunk, so that whoever runs it may do something
else in between; what it yields is the time that the plan predicts for the chunk.
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

    from vllm.diffusion.core.buffers import Buffers
    from vllm.diffusion.core.spans import AttentionLayout
    from vllm.diffusion.engine.worker.batch import StepBatch, StepInputs
    from vllm.diffusion.engine.worker.sample_rows import SamplePart, SampleRows
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.diffusion.memory import ActivationPool, PageStore, Plan
    from vllm.diffusion.models.base import DiffusionModel
    from vllm.diffusion.ops import Array
    from vllm.diffusion.parallel.groups import Ranks

_ALL = slice(None)

T = TypeVar("T")
# Work that stops before every chunk and says what the plan predicts for it, in seconds.
Chunked: TypeAlias = Generator[float, None, T]


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


class ForwardPass:
    """Computes steps: from a packed batch to the table of its samples.

    Args:
        model: the loaded model.
        pool: memory of steps.
        caches: kept keys and values.
        ranks: ranks that compute the same steps.

    Attributes:
        note_first: takes a part of a step and its hidden states [r, D], which other requests may
            need; None where no request shares its prompt.
    """

    def __init__(
        self, model: DiffusionModel, pool: ActivationPool, caches: PageStore, ranks: Ranks
    ) -> None:
        self.model, self.pool, self.caches, self.ranks = model, pool, caches, ranks
        self.note_first: Callable[[StepBatch, SamplePart[Array], Tensor], None] | None = None

    def run(self, rows: SampleRows, plan: Plan, body: BodyOutputs | None = None) -> Chunked[Tensor]:
        """Compute a step chunk by chunk and return the table of its samples.

        Args:
            rows: the step's sample rows.
            plan: plan of the step.
            body: the layers' results, where a graph has computed them.
        """
        batch, parts = rows.batch, tuple(rows.parts(plan.rows.logits))  # while the graph runs
        pool, model, caches = self.pool, self.model, self.caches
        with pool.scope("step"):
            stages.INPUTS.expect(pool, batch.num_rows)
            stages.RESULTS.expect(pool, batch.shape.sample_rows)
            if body is not None:
                samples = ops.to_device(parts, caches.device)
            else:
                attend_chunks = [[chunk] for chunk in chunks(batch.num_rows, plan.rows.attend)]
                given = batch.inputs(attend_chunks), parts
                inputs, samples = ops.to_device(given, caches.device)
                if batch.slot_mapping.size:
                    caches.begin_step(batch.slot_mapping, reads=batch.reads_kept)
                where, ended = (pool, pool, caches), model.routes_windows
                body = yield from run_body(model, inputs, plan, *where, to_the_end=ended)
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
        return sample(self.model, [(hidden, rows.row_groups(part, positions))], self.pool)

    def broadcast_samples(self, samples: Samples[Tensor]) -> Tensor:
        """Return the table of rank 0's samples, of a step that all ranks have computed.

        So all of them commit the same tokens.
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
    attending = list(zip(chunks(num_rows, plan.rows.attend), inputs.layouts, strict=True))
    feeding = list(chunks(num_rows, plan.rows.feed_forward))
    seconds, first_adapter_row = plan.chunk_seconds, num_rows - inputs.num_adapter_rows

    def tables(rows: slice) -> Rotary:
        row_positions = inputs.positions[rows]
        return model.rotary(row_positions, scratch) if rotary is None else rotary.rows(rows)

    def keys_values(index: int, product: Tensor) -> Chunked[None]:
        layer = model.layers[index]
        if inputs.slot_mapping.numel():
            caches.turn_to(index)
        for rows in writing:
            yield seconds.keys_values
            target = target_of(rows, num_rows, index, inputs.slot_mapping, caches)
            with scratch.scope("keys-values"):
                layer.attention.keys_values(x[rows], tables(rows), product[rows], scratch, target)

    for index, layer in enumerate(islice(model.layers, last + to_the_end)):
        yield from keys_values(index, product)
        q, k, v = layer.attention.split(product)
        for rows, layouts in attending:
            yield seconds.attend
            with scratch.scope("attend"):
                sources = sources_of(layouts, k, v, index, caches)
                given = x[rows], tables(rows), sources, None if q is None else q[rows], scratch
                layer.attention.attend(*given, num_adapter_rows=rows.stop - first_adapter_row)
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
    parts: Iterable[SamplePart[Tensor]],
    scratch: Buffers,
    caches: PageStore,
) -> Generator[Tensor]:
    """Run the rest of the last layer on the sample rows alone, yielding [r, D] part by part.

    A yielded tensor is valid until the next one is asked for.
    """
    index = len(model.layers) - 1
    layer = model.layers[index]
    for rows, _, layouts, _, num_adapted in parts:
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
            sources = sources_of(layouts, *body.keys_values, index, caches)
            layer.attention.attend(x, rotary, sources, None, scratch, num_adapter_rows=num_adapted)
            layer.mlp_stage.feed_forward(x, scratch)
            yield x


def _projections(
    model: DiffusionModel, num_heads: int, num_rows: int, residents: Buffers
) -> Tensor:
    """Take room for a layer's keys and values of all rows, and for so many heads of queries."""
    listed = stages.fused_heads(model.dtype, num_heads, model.num_kv_heads, model.head_dim)
    return listed.take(residents, num_rows)


def target_of(
    rows: slice, num_rows: int, index: int, slot_mapping: Tensor, caches: PageStore
) -> KeyTarget | None:
    """Return where a layer's keys and values of a chunk are stored, or None.

    The slots of the batch's last rows are `slot_mapping` [W].
    """
    first = num_rows - slot_mapping.numel()
    slots = slot_mapping[max(rows.start - first, 0) : max(rows.stop - first, 0)]
    return KeyTarget(caches.keys(index), caches.values(index), slots) if slots.numel() else None


def sources_of(
    layouts: Iterable[AttentionLayout[Tensor]],
    k: Tensor,
    v: Tensor,
    index: int,
    caches: PageStore,
    heads: slice = _ALL,
) -> list[KeySource]:
    """Return where the rows of a chunk find their keys and values.

    Args:
        layouts: which keys the rows read.
        k, v: [T, heads, hd], keys and values of this step.
        index: index of the layer.
        caches: the store.
        heads: the key/value heads in `k` and `v`.
    """
    return [
        KeySource(k, v, layout)
        if layout.pages is None
        else KeySource(caches.keys(index)[:, heads], caches.values(index)[:, heads], layout)
        for layout in layouts
    ]

# SPDX-License-Identifier: Apache-2.0
"""Inputs of a step for the device: named arrays on the host, and their tensors on the device.

Every struct here exists twice, with an array and with a tensor in each of its fields.
`ops.to_device` and `ops.GraphInputs` make one of the other, so no order of arrays has to be agreed
on. Letters: T rows of the step, W rows that have slots, S sequences, r sample rows of a part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from vllm.diffusion.core.spans import AttentionLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from vllm.diffusion.core.spans import PageTable
    from vllm.diffusion.engine.worker.batch import Packing, SpanGroup, StepBatch
    from vllm.diffusion.engine.worker.sample_rows import SamplePart
    from vllm.diffusion.ops import Array

_ALL = slice(None)

A = TypeVar("A")  # an array of the host, or a tensor of the device


class SequenceBounds(NamedTuple, Generic[A]):
    """Where the queries and keys of consecutive sequences lie, as in `AttentionLayout`.

    Attributes:
        query_ends: [S + 1] int32, the field's cu_seqlens.
        key_starts: [S + 1] int32.
        key_counts: [S] int32.
        block_lengths, firsts: [S] int32; meaningless where no sequence is on a block grid.
    """

    query_ends: A
    key_starts: A
    key_counts: A
    block_lengths: A
    firsts: A


class StepInputs(NamedTuple, Generic[A]):
    """Inputs of the layers in a step.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, from 0 in every sequence.
        slot_mapping: [W] int64, the store's row of each of the last W rows; negative for none.
        bounds: sequences in every span group of every chunk of the attend stage.
    """

    token_ids: A
    positions: A
    slot_mapping: A
    bounds: tuple[tuple[SequenceBounds[A], ...], ...]


class SampleInputs(NamedTuple, Generic[A]):
    """Inputs of the last layer for a part of the sample rows.

    Attributes:
        rows: [r] int64, rows of the step.
        positions: [r] int64, relative to the canvas.
        bounds: sequences in every span group of the part.
    """

    rows: A
    positions: A
    bounds: tuple[SequenceBounds[A], ...]


def pack(
    batch: StepBatch, attend_chunks: Iterable[Sequence[SpanGroup]], rows: slice = _ALL
) -> StepInputs[Array]:
    """Return the inputs of some rows of a batch whose attend stage runs in these chunks."""
    bounds = tuple(tuple(bounds_of(group) for group in groups) for groups in attend_chunks)
    return StepInputs(batch.token_ids[rows], batch.positions[rows], batch.slot_mapping, bounds)


def pack_samples(part: SamplePart) -> SampleInputs[Array]:
    """Return the inputs of a part of the sample rows."""
    bounds = tuple(bounds_of(group) for group in part.span_groups)
    return SampleInputs(part.rows, part.positions, bounds)


def bounds_of(group: SpanGroup) -> SequenceBounds[Array]:
    """Return where the sequences of a span group lie."""
    _, query_ends, key_starts, key_ends, blocks, firsts = zip(*group.spans, strict=True)
    counts = [end - start for start, end in zip(key_starts, key_ends, strict=True)]
    return SequenceBounds(
        query_ends=np.array((0, *query_ends), dtype=np.int32),
        key_starts=np.array((*key_starts, key_ends[-1]), dtype=np.int32),
        key_counts=np.array(counts, dtype=np.int32),
        block_lengths=np.array(blocks, dtype=np.int32),
        firsts=np.array(firsts, dtype=np.int32),
    )


def empty(num_rows: int, num_slots: int, num_sequences: int) -> StepInputs[Array]:
    """Return inputs of these sizes, in one chunk of one span group, to be filled by `fill`."""
    return StepInputs(
        token_ids=np.zeros(num_rows, dtype=np.int64),
        positions=np.zeros(num_rows, dtype=np.int64),
        slot_mapping=np.zeros(num_slots, dtype=np.int64),
        bounds=(
            (
                SequenceBounds(
                    query_ends=np.zeros(num_sequences + 1, dtype=np.int32),
                    key_starts=np.zeros(num_sequences + 1, dtype=np.int32),
                    key_counts=np.zeros(num_sequences, dtype=np.int32),
                    block_lengths=np.zeros(num_sequences, dtype=np.int32),
                    firsts=np.zeros(num_sequences, dtype=np.int32),
                ),
            ),
        ),
    )


def fill(inputs: StepInputs[Array], batch: StepBatch, before: Packing | None = None) -> None:
    """Write a batch and its padding into inputs made by `empty`, no smaller and of the same kind.

    Rows that are left form one more sequence, which nothing reads. Among whole sequences it attends
    to itself, so that no row holds NaN; among windows it has no keys, and attention to nothing is
    zero.

    Args:
        inputs: arrays to write to.
        batch: the step.
        before: packing of the batch that the inputs hold, if any; if it is this batch's, only
            tokens are written.
    """
    if batch.packing is before:
        inputs.token_ids[: batch.num_rows] = batch.token_ids
        return
    _fill(inputs.token_ids, batch.token_ids, 0)
    _fill(inputs.positions, batch.positions, 0)
    _fill(inputs.slot_mapping, batch.slot_mapping, -1)
    ((bounds,),) = inputs.bounds
    size, num_rows = inputs.token_ids.size, batch.num_rows
    ends, kept, counts, block_lengths, firsts = batch.packing.bounds
    num_sequences, num_padding_keys = ends.size, 0 if inputs.slot_mapping.size else size - num_rows
    bounds.query_ends[0] = 0
    _fill(bounds.query_ends[1:], ends, size)
    _fill(bounds.key_starts, kept, 0)
    bounds.key_starts[num_sequences] = num_rows
    _fill(bounds.key_counts, counts, 0)
    bounds.key_counts[num_sequences] = num_padding_keys
    _fill(bounds.block_lengths, block_lengths, 0)
    _fill(bounds.firsts, firsts, 0)


def layout_of(
    group: SpanGroup, bounds: SequenceBounds[Tensor], pages: PageTable
) -> AttentionLayout:
    """Return a span group as attention takes it, given its bounds and the pages of kept keys."""
    has_blocks = any(span.block_length for span in group.spans)
    return AttentionLayout(
        query_ends=bounds.query_ends,
        key_starts=bounds.key_starts,
        key_counts=bounds.key_counts,
        max_queries=max(span.num_queries for span in group.spans),
        max_keys=max(span.num_keys for span in group.spans),
        spans=group.spans,
        pages=pages if group.is_cached else None,
        block_lengths=bounds.block_lengths if has_blocks else None,
        firsts=bounds.firsts if has_blocks else None,
    )


def _fill(array: Array, values: Array, rest: int) -> None:
    array[: values.size] = values
    array[values.size :] = rest

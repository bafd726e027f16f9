# SPDX-License-Identifier: Apache-2.0
"""The rows of one denoise step, packed without padding, on the host.

Whole sequences come first, one after the other; with guidance a request has two, its own and the
unconditional one, whose prompt is masked. The windows of requests that keep keys and values follow.
What a request computes of one sequence is a run of rows that read the same keys, or, where the
family's visibility is block-causal, the keys of their own blocks and of those before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm.diffusion.core.spans import Span
from vllm.diffusion.memory import StepShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.diffusion.decoding import ForwardTarget
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.ops import Array


class PackedSequence(NamedTuple):
    """Rows of the batch that attend to the same keys, each row to as many of them as `Span` says.

    Attributes:
        start, end: rows of the batch, half-open.
        first: position of row `start`.
        first_key: where the key of position 0 lies: a row of the batch, or of the store's table if
            `is_cached`.
        num_keys: keys from `first_key` on.
        is_cached: the keys are read from the store; only where this step does not compute them all.
        first_kept: row of the key of position 0 in the store's table, if it is kept; else
            `first_key`.
        block_length: block length, as in `Span`.
    """

    start: int
    end: int
    first: int
    first_key: int
    num_keys: int
    is_cached: bool
    first_kept: int
    block_length: int

    def counted(self, positions: Array) -> list[tuple[int, PackedSequence]]:
        """Split `positions` [r], ascending, into runs that read the same keys.

        Returns the number of rows of each run, with its sequence.
        """
        if not self.block_length:
            return [(positions.size, self)]
        counted = []
        while positions.size:
            end = (int(positions[0]) // self.block_length + 1) * self.block_length
            is_last = positions[-1] < end  # most often all of them are in one block
            count = positions.size if is_last else int(np.searchsorted(positions, end))
            num_keys = min(end, self.num_keys)
            counted.append((count, self._replace(num_keys=num_keys, block_length=0)))
            positions = positions[count:]
        return counted


class SpanGroup(NamedTuple):
    """Consecutive rows whose keys lie in the same buffer.

    Attributes:
        rows: consecutive rows of what is grouped: a chunk of the batch, or sample rows.
        spans: the sequences of these rows; queries count from the first of `rows`.
        is_cached: the keys lie in the store.
    """

    rows: slice
    spans: tuple[Span, ...]
    is_cached: bool


@dataclass(frozen=True, eq=False)
class Packing:
    """Layout of the rows of a step; the next step often has the same one.

    Attributes:
        canvases: the requests, in the order of their rows.
        windows: per request, the positions that are computed.
        positions: [T] int64, from 0 in every sequence.
        slot_mapping: [W] int64, the store's row of each of the last W rows, which belong to
            windows.
        fields: [number of fields of PackedSequence, S] int64, of all sequences. They tile the rows
            in this order: sequences that keep nothing, windows of all positions, windows of some.
    """

    canvases: tuple[Canvas, ...]
    windows: tuple[Window, ...]
    positions: Array
    slot_mapping: Array
    fields: Array

    @property
    def num_sequences(self) -> int:
        return int(self.fields.shape[1])

    @cached_property
    def sequences(self) -> tuple[PackedSequence, ...]:
        """All sequences in the order of their rows; replaying a graph does not need them."""
        return tuple([PackedSequence(*fields) for fields in self.fields.T.tolist()])

    @cached_property
    def own(self) -> tuple[tuple[PackedSequence, ...], ...]:
        """Sequences of each request: its own, and with guidance the unconditional one."""
        sequences = iter(self.sequences)
        return tuple([tuple(islice(sequences, c.window.num_sequences)) for c in self.canvases])

    @cached_property
    def longest(self) -> int:
        """Number of keys of the sequence that reads most."""
        return int(self.fields[PackedSequence._fields.index("num_keys")].max())

    @cached_property
    def kept_keys(self) -> int:
        """Keys of the longest sequence that reads its cache; 0 if none does."""
        _, _, _, _, counts, is_cached, _, _ = self.fields
        return int((counts * is_cached).max())

    @property
    def bounds(self) -> tuple[Array, ...]:
        """Bounds of all sequences, [S] int64 each.

        In order: `end`, `first_kept`, `num_keys`, `block_length` and `first`.
        """
        _, ends, firsts, _, counts, _, kept, block_lengths = self.fields
        return ends, kept, counts, block_lengths, firsts


@dataclass(frozen=True)
class StepBatch:
    """Input of one step, which it does not outlive.

    Attributes:
        token_ids: [T] int64.
        works: per request, the target of the forward.
        packing: layout of the rows.
        logit_shift: 1 where the token at a position is read from the row before it, else 0.
    """

    token_ids: Array
    works: tuple[ForwardTarget, ...]
    packing: Packing
    logit_shift: int

    @property
    def canvases(self) -> tuple[Canvas, ...]:
        return self.packing.canvases

    @property
    def positions(self) -> Array:
        return self.packing.positions

    @property
    def slot_mapping(self) -> Array:
        return self.packing.slot_mapping

    @property
    def sequences(self) -> Sequence[PackedSequence]:
        return self.packing.sequences

    @property
    def num_rows(self) -> int:
        return self.token_ids.size

    @property
    def num_whole(self) -> int:
        """Number of rows of sequences that keep nothing; these come first."""
        return self.num_rows - self.slot_mapping.size

    @cached_property
    def shape(self) -> StepShape:
        """Sizes that a plan depends on."""
        return StepShape(
            rows=self.num_rows,
            sample_rows=self.sample_rows,
            longest=self.packing.longest,
            num_sequences=self.packing.num_sequences,
            kept_keys=self.packing.kept_keys,
            keeps=self.slot_mapping.size > 0,
        )

    @cached_property
    def sample_rows(self) -> int:
        """Number of rows whose logits are computed: two for a position that is guided."""
        requests = zip(self.works, self.canvases, strict=True)
        return sum([work.eligible.size * canvas.window.num_sequences for work, canvas in requests])

    @property
    def reads_kept(self) -> bool:
        """Whether some rows read keys that this step does not compute."""
        return self.packing.kept_keys > 0

    @property
    def num_sampled(self) -> int:
        return sum([work.eligible.size for work in self.works])

    def span_groups(self, *chunk: slice) -> tuple[SpanGroup, ...]:
        """Return what a chunk of rows attends to; rows count from the chunk's first.

        Args:
            chunk: ranges of rows, in the order in which they follow one another.
        """
        counted: list[tuple[int, PackedSequence]] = []
        newest: PackedSequence | None = None
        for rows, sequence in product(chunk, self.sequences):
            start, end = max(sequence.start, rows.start), min(sequence.end, rows.stop)
            if start >= end:
                continue
            if newest is sequence and newest.block_length == 0:  # all its rows read the same
                counted[-1] = (counted[-1][0] + end - start, counted[-1][1])
                continue
            newest, first = sequence, sequence.first + start - sequence.start
            counted.append((end - start, sequence._replace(first=first)))
        return group_spans(counted)


def build_batch(
    canvases: Iterable[Canvas], logit_shift: int, before: Packing | None = None
) -> StepBatch:
    """Pack the rows that `canvases` need computed in this step.

    Args:
        canvases: the requests of the step.
        logit_shift: 1 where the token at a position is read from the row before it, else 0.
        before: packing of an earlier step, reused if nothing moved; what is kept must lie where it
            did then.
    """
    # What keeps nothing comes first, what reads keys that this step does not compute last.
    forwards = sorted([(canvas, *canvas.next_forward()) for canvas in canvases], key=_kind)
    own, works, windows = zip(*forwards, strict=True)
    rows = [
        tokens[window.first : window.stop]
        for canvas, window in zip(own, windows, strict=True)
        for tokens in canvas.sequences
    ]
    if before is None or before.canvases != own or before.windows != windows:
        before = _pack(own, windows)
    return StepBatch(np.concatenate(rows), works, before, logit_shift)


def _kind(forward: tuple[Canvas, ForwardTarget, Window]) -> int:
    """Sort key of a request's rows: first what keeps nothing, last what reads the store."""
    canvas, _, window = forward
    return (canvas.window.cache is not None) + window.reads_kept


def _pack(canvases: tuple[Canvas, ...], windows: tuple[Window, ...]) -> Packing:
    """Lay out the rows of these requests one after the other, in this order, without padding."""
    slots, kept_starts, numbers = [_NO_SLOTS], [], list[int]()
    for canvas, window in zip(canvases, windows, strict=True):
        cache, first, stop = canvas.window.cache, window.first, window.stop
        for kept_start in canvas.window.kept_starts:
            numbers += window[1:]
            if cache is None:
                kept_starts.append(_NOT_KEPT)
            else:
                kept_starts.append(cache.start + kept_start)
                slots.append(cache.slots[kept_start + first : kept_start + stop])
    kept = np.array(kept_starts)
    placed = np.fromiter(numbers, np.int64).reshape(kept.size, -1)
    firsts, stops, num_keys, block_lengths, reads_kept = placed.T
    counts = stops - firsts
    ends = counts.cumsum()
    starts = ends - counts
    offsets = starts - firsts
    first_kept = np.where(kept == _NOT_KEPT, offsets, kept)
    first_keys = np.where(reads_kept, first_kept, offsets)
    return Packing(
        canvases,
        windows,
        positions=np.arange(ends[-1]) - np.repeat(offsets, counts),
        slot_mapping=np.concatenate(slots),
        fields=np.array(
            (starts, ends, firsts, first_keys, num_keys, reads_kept, first_kept, block_lengths)
        ),
    )


_NO_SLOTS, _NOT_KEPT = np.empty(0, dtype=np.int64), -1


def group_spans(counted: Sequence[tuple[int, PackedSequence]]) -> tuple[SpanGroup, ...]:
    """Group runs (rows, sequence) by where their keys lie; runs with cached keys come last."""
    groups, start = [], 0
    for is_cached in (False, True):
        spans, end = [], 0
        for count, sequence in counted:
            if sequence.is_cached == is_cached:
                _, _, first, key, num_keys, _, _, block_length = sequence
                spans.append(Span(end, end + count, key, key + num_keys, block_length, first))
                end += count
        if spans:
            groups.append(SpanGroup(slice(start, start + end), tuple(spans), is_cached))
        start += end
    return tuple(groups)

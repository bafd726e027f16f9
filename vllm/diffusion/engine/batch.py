# SPDX-License-Identifier: Apache-2.0
"""The rows of one denoise step, packed without padding; all of it on the host.

Whole sequences come first, one after the other; with guidance a request has two, its own and the
unconditional one, whose prompt is masked. The windows of requests that keep keys and values follow.
What a request computes of one sequence is a run of rows that read the same keys, or, where the
family's visibility is block-causal, the keys of their own blocks and of those before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from vllm.diffusion.decoding import Candidates, Work
from vllm.diffusion.memory import StepShape
from vllm.diffusion.sampling import RowGroup
from vllm.diffusion.spans import Span
from vllm.diffusion.visibility import Forward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from vllm.diffusion.engine.canvas import Canvas
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import NoiseSource


class PackedSequence(NamedTuple):
    """Rows of the batch that attend to the same keys, each to as many as `Span` says.

    Attributes:
        rows: of the batch.
        keys: rows of the batch, or kept keys by the store's table.
        is_cached: which of the two; kept ones only where this step does not compute them all.
        kept: the keys by the store's table, where they are kept.
        block_length, first: as `Span` has them.
    """

    rows: slice
    keys: slice
    is_cached: bool
    kept: slice | None = None
    block_length: int = 0
    first: int = 0

    def part(self, first_row: int, last_row: int) -> PackedSequence:
        """Some of the rows."""
        skipped = first_row - self.rows.start if self.block_length else 0
        return self._replace(rows=slice(first_row, last_row), first=self.first + skipped)


Sequences: TypeAlias = tuple[PackedSequence, ...]


class SpanGroup(NamedTuple):
    """Consecutive rows whose keys lie in the same buffer.

    Attributes:
        rows: of whatever is cut into groups: a chunk of the batch, or sample rows.
        spans: their sequences; queries count from the first of `rows`.
        is_cached: the keys are kept ones, by the store's table.
    """

    rows: slice
    spans: tuple[Span, ...]
    is_cached: bool


class _Predicting(NamedTuple):
    """The sample rows of a request: those that predict some positions of it.

    Attributes:
        request: its number in the batch.
        positions: [R] int64, on the canvas.
        rows: [R] int64, of the batch, ascending.
        sequences: to which they belong, in order.
        unconditional_rows, unconditional_sequences: the same of its second sequence, with guidance.
    """

    request: int
    positions: Array
    rows: Array
    sequences: Sequences
    unconditional_rows: Array | None = None
    unconditional_sequences: Sequences = ()


class SamplePart(NamedTuple):
    """Sample rows, as many as may have logits at a time.

    Attributes:
        rows: [r] int64, of the batch.
        positions: [r] int64, on the canvas.
        span_groups: what the rows attend to.
        pieces: per request: its number, and the places in `rows` of its rows and of those of its
            unconditional sequence.
    """

    rows: Array
    positions: Array
    span_groups: tuple[SpanGroup, ...]
    pieces: tuple[tuple[int, slice, slice | None], ...]


@dataclass(frozen=True)
class StepBatch:
    """One step's input; it lives for that step.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, from 0 in every sequence.
        slot_mapping: [W] int64, the store's row of each of the last W rows, which are of windows.
        sequences: they tile the rows; those that keep keys come last, after windows of all
            positions those of some.
        canvases: the requests, in the order of their rows.
        works: per request, what the forward is for.
        predicting: per request, its sample rows.
    """

    token_ids: Array
    positions: Array
    slot_mapping: Array
    sequences: Sequences
    canvases: tuple[Canvas, ...]
    works: tuple[Work, ...]
    predicting: tuple[_Predicting, ...]

    @property
    def num_rows(self) -> int:
        return self.token_ids.size

    @property
    def num_whole(self) -> int:
        """Rows of whole sequences, which come first and keep nothing."""
        return self.num_rows - self.slot_mapping.size

    @cached_property
    def shape(self) -> StepShape:
        """What a plan depends on."""
        unconditional = (part.unconditional_rows for part in self.predicting)
        num_unconditional = sum(rows.size for rows in unconditional if rows is not None)
        return StepShape(
            rows=self.num_rows,
            sample_rows=self.num_sampled + num_unconditional,
            longest=max(sequence.keys.stop - sequence.keys.start for sequence in self.sequences),
            num_sequences=len(self.sequences),
            kept_keys=max(
                (s.keys.stop - s.keys.start for s in self.sequences if s.is_cached), default=0
            ),
        )

    @property
    def reads_kept(self) -> bool:
        """Whether some rows read keys that this step does not compute."""
        return any(sequence.is_cached for sequence in self.sequences)

    @property
    def num_sampled(self) -> int:
        return sum(work.eligible.size for work in self.works)

    def span_groups(self, chunk: slice) -> tuple[SpanGroup, ...]:
        """What a chunk of consecutive rows attends to; rows count from the chunk's first."""
        counts = []
        for sequence in self.sequences:
            first, last = max(sequence.rows.start, chunk.start), min(sequence.rows.stop, chunk.stop)
            if first < last:
                counts.append((last - first, sequence.part(first, last)))
        return _group_spans(counts)

    def sample_parts(self, rows_per_part: int) -> Iterator[SamplePart]:
        """The sample rows, at most `rows_per_part` at a time (two of a guided request)."""
        part = _PartBuilder()
        for own in self.predicting:
            done, weight = 0, 1 if own.unconditional_rows is None else 2
            while done < own.rows.size:
                room = (rows_per_part - part.num_rows) // weight
                if room < 1 and part.num_rows:
                    yield part.finish()
                    part = _PartBuilder()
                    continue
                piece = slice(done, min(done + max(room, 1), own.rows.size))
                part.add(own, piece)
                done = piece.stop
        if part.num_rows:
            yield part.finish()

    def row_groups(self, part: SamplePart, positions: torch.Tensor) -> tuple[RowGroup, ...]:
        """How the rows of a part are sampled, with the part's `positions` on the device."""
        return tuple(
            self._row_group(
                self.canvases[number], part.positions[rows], rows, unconditional, positions[rows]
            )
            for number, rows, unconditional in part.pieces
        )

    @staticmethod
    def _row_group(
        canvas: Canvas,
        on_canvas: Array,
        rows: slice,
        unconditional: slice | None,
        positions: torch.Tensor,
    ) -> RowGroup:
        return RowGroup(
            params=canvas.params,
            scoring=canvas.rule.scoring,
            step=canvas.num_forwards,
            forbid_mask=canvas.rule.forbid_mask,
            rows=rows,
            unconditional_rows=unconditional,
            positions=positions,
            adjust=canvas.adjust_logits,
            token_ids=canvas.token_ids(on_canvas),
        )

    def candidates(self, sampled: torch.Tensor, noise: NoiseSource) -> list[Candidates]:
        """Cut what was sampled into one part per request.

        Args:
            sampled: [3 or more, R] float64 on the host, as `sample` returns it.
            noise: source of the numbers that some rules want for each candidate.
        """
        found = sampled.numpy()
        tokens, scores, greedy = found[0].astype(np.int64), found[1], found[2].astype(np.int64)
        candidates, start = [], 0
        for canvas, work in zip(self.canvases, self.works, strict=True):
            own = slice(start, start + work.eligible.size)
            candidates.append(
                Candidates(
                    work.eligible,
                    tokens[own],
                    scores[own],
                    greedy[own],
                    canvas.draws(work.eligible, noise),
                    found[3:, own] if canvas.wants_logprobs else None,
                )
            )
            start = own.stop
        return candidates


def build_batch(canvases: Sequence[Canvas], logit_shift: int) -> StepBatch:
    """Pack what `canvases` need computed in this step, and list the sample rows.

    Args:
        canvases: the requests of the step.
        logit_shift: 1 where the token at a position is read from the row before it, else 0.
    """
    packing = _Packing()
    windows = sorted(map(_Window.of, canvases), key=_Window.place)
    predicting = tuple(
        packing.add(number, window, logit_shift) for number, window in enumerate(windows)
    )
    return StepBatch(
        token_ids=np.concatenate(packing.token_ids),
        positions=np.concatenate(packing.positions),
        slot_mapping=np.concatenate([_NO_SLOTS, *packing.slots]),
        sequences=tuple(packing.sequences),
        canvases=tuple(window.canvas for window in windows),
        works=tuple(window.work for window in windows),
        predicting=predicting,
    )


_NO_SLOTS = np.empty(0, dtype=np.int64)


class _Window(NamedTuple):
    """What is computed of a request in this step, and what for."""

    canvas: Canvas
    work: Work
    forward: Forward

    @classmethod
    def of(cls, canvas: Canvas) -> _Window:
        return cls(canvas, *canvas.next_forward())

    @property
    def is_cached(self) -> bool:
        """Whether it may read keys that this step does not compute."""
        return self.forward.num_keys > len(self.forward.window)

    def place(self) -> tuple[bool, bool]:
        """In the batch: what keeps nothing comes first, what reads kept keys last."""
        return self.canvas.cache is not None, self.is_cached


class _Packing:
    """Rows as they are put one after the other."""

    def __init__(self) -> None:
        self.token_ids: list[Array] = []
        self.positions: list[Array] = []
        self.slots: list[Array] = []
        self.sequences: list[PackedSequence] = []
        self._num_rows = 0

    def add(self, number: int, window: _Window, logit_shift: int) -> _Predicting:
        canvas = window.canvas
        positions = window.work.eligible
        rows = np.maximum(positions - logit_shift, 0) if logit_shift else positions
        first_row, own = self._append(window, canvas.tokens, rows)
        on_canvas = positions - canvas.prompt_length
        predicting = _Predicting(number, on_canvas, rows + first_row, own)
        if not canvas.is_guided:
            return predicting
        hidden = canvas.unconditional_tokens()
        first_row, unconditional = self._append(window, hidden, rows, canvas.unconditional_start)
        return predicting._replace(
            unconditional_rows=rows + first_row, unconditional_sequences=unconditional
        )

    def _append(
        self, window: _Window, tokens: Array, sampled: Array, kept_start: int = 0
    ) -> tuple[int, Sequences]:
        """Put a window behind the rows so far.

        Args:
            window: what is computed.
            tokens: [T] int64, of its sequence.
            sampled: [R], positions of its sample rows, ascending.
            kept_start: where position 0 is among the kept positions of the request.

        Returns:
            where position 0 would be among the rows, and the sequences of the sample rows.
        """
        canvas, forward = window.canvas, window.forward
        computed = slice(forward.window.start, forward.window.stop)
        self.token_ids.append(tokens[computed])
        self.positions.append(canvas.positions[computed])
        first_row = self._num_rows - computed.start
        self._num_rows += len(forward.window)
        if canvas.cache is not None:
            self.slots.append(canvas.cache.slots[kept_start:][computed])

        block_length, keys = canvas.visibility.block_length, range(forward.num_keys)
        if block_length and computed.start // block_length == (computed.stop - 1) // block_length:
            ((_, keys),) = canvas.visibility.spans(forward)  # all rows read the same
            block_length = 0

        def sequence(queries: range, keys: range, block_length: int = 0) -> PackedSequence:
            rows, kept = _moved(queries, first_row), None
            first = queries.start if block_length else 0
            if canvas.cache is not None:
                kept = _moved(keys, canvas.cache.start + kept_start)
            read = kept if kept is not None and window.is_cached else _moved(keys, first_row)
            return PackedSequence(rows, read, window.is_cached, kept, block_length, first)

        whole = sequence(forward.window, keys, block_length)
        self.sequences.append(whole)
        if not block_length or not sampled.size:
            return first_row, (whole,)
        # Sample rows do not follow one another: they are listed block by block.
        queries = range(int(sampled[0]), int(sampled[-1]) + 1)
        seen = canvas.visibility.spans(Forward(queries, kept=forward.num_keys))
        return first_row, tuple(sequence(*own) for own in seen)


def _moved(positions: range, start: int) -> slice:
    """Positions of a sequence, counted by where its position 0 is."""
    return slice(start + positions.start, start + positions.stop)


class _PartBuilder:
    """Sample rows as they are put one after the other, in the order of the batch."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._rows: list[Array] = []
        self._positions: list[Array] = []
        self._counted: list[tuple[int, PackedSequence]] = []
        self._pieces: list[tuple[int, slice, slice | None]] = []

    def add(self, own: _Predicting, piece: slice) -> None:
        positions = own.positions[piece]
        rows = self._append(own.rows[piece], positions, own.sequences)
        unconditional = None
        if own.unconditional_rows is not None:
            unconditional = self._append(
                own.unconditional_rows[piece], positions, own.unconditional_sequences
            )
        self._pieces.append((own.request, rows, unconditional))

    def _append(self, rows: Array, positions: Array, sequences: Sequences) -> slice:
        place = slice(self.num_rows, self.num_rows + rows.size)
        self._rows.append(rows)
        self._positions.append(positions)
        self._counted += _counted(rows, sequences)
        self.num_rows = place.stop
        return place

    def finish(self) -> SamplePart:
        return SamplePart(
            np.concatenate(self._rows),
            np.concatenate(self._positions),
            _group_spans(self._counted),
            tuple(self._pieces),
        )


def _counted(rows: Array, sequences: Sequences) -> list[tuple[int, PackedSequence]]:
    """How many of the rows [r], ascending, belong to each of the sequences that have some."""
    if len(sequences) == 1:
        return [(rows.size, sequences[0])]
    ends = np.searchsorted(rows, [sequence.rows.stop for sequence in sequences])
    counts = np.diff(ends, prepend=0).tolist()
    return [(n, sequence) for n, sequence in zip(counts, sequences, strict=True) if n]


def _group_spans(counted: Sequence[tuple[int, PackedSequence]]) -> tuple[SpanGroup, ...]:
    """Span groups of runs of rows: how many, and of which sequence; cached ones come last."""
    groups, start = [], 0
    for is_cached in (False, True):
        spans, end = [], 0
        for count, sequence in counted:
            if sequence.is_cached == is_cached:
                keys, grid = sequence.keys, (sequence.block_length, sequence.first)
                spans.append(Span(end, end + count, keys.start, keys.stop, *grid))
                end += count
        if spans:
            groups.append(SpanGroup(slice(start, start + end), tuple(spans), is_cached))
        start += end
    return tuple(groups)

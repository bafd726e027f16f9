# SPDX-License-Identifier: Apache-2.0
"""The rows of one denoise step, packed without padding; all of it on the host.

Whole sequences come first, one after the other; with guidance a request has two, its own and the
prompt-masked one. The windows of requests that keep keys and values follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.diffusion.decoding import Candidates, Work
from vllm.diffusion.layers.attention import Span
from vllm.diffusion.memory import StepShape
from vllm.diffusion.sampling import RowGroup

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm.diffusion.engine.canvas import Canvas
    from vllm.diffusion.memory import CacheRange
    from vllm.diffusion.ops import Array
    from vllm.diffusion.sampling import NoiseSource


class PackedSequence(NamedTuple):
    """Rows of the batch that attend to the same keys.

    Attributes:
        rows: of the batch.
        keys: rows of this step's own keys, or of the pool of kept ones.
        is_cached: which of the two.
    """

    rows: slice
    keys: slice
    is_cached: bool


class SpanGroup(NamedTuple):
    """Consecutive rows whose keys lie in the same buffer.

    Attributes:
        rows: of whatever is cut into groups: a chunk of the batch, or rows that are read.
        spans: their sequences; queries count from the first of `rows`.
        is_cached: the keys lie in the pool of kept ones.
    """

    rows: slice
    spans: tuple[Span, ...]
    is_cached: bool


class _Read(NamedTuple):
    """Rows that predict some positions of one request."""

    request: int  # its number in the batch
    positions: Array  # [R] int64, on the canvas
    rows: Array  # [R] int64, of the batch
    sequence: PackedSequence  # to which they belong
    twin_rows: Array | None = None  # the same positions in the prompt-masked sequence
    twin_sequence: PackedSequence | None = None


class ReadPart(NamedTuple):
    """Rows that are read after the last layer, as many as may have logits at a time.

    Attributes:
        rows: [r] int64, of the batch.
        positions: [r] int64, on the canvas.
        span_groups: what the rows attend to.
        pieces: per request: its number, and the places of its rows and of their twins in `rows`.
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
        slots: [W] int64, the pool's row of each of the last W rows, which belong to windows.
        sequences: they tile the rows; those with cached keys come last.
        canvases: the requests, in the order of their rows.
        works: per request, what the forward is for.
        reads: per request, the rows to sample.
    """

    token_ids: Array
    positions: Array
    slots: Array
    sequences: tuple[PackedSequence, ...]
    canvases: tuple[Canvas, ...]
    works: tuple[Work, ...]
    reads: tuple[_Read, ...]

    @property
    def num_rows(self) -> int:
        return self.token_ids.size

    @property
    def num_whole(self) -> int:
        """Rows of whole sequences, which come first and keep nothing."""
        return self.num_rows - self.slots.size

    @cached_property
    def shape(self) -> StepShape:
        """What a plan depends on."""
        twins = sum(read.rows.size for read in self.reads if read.twin_rows is not None)
        return StepShape(
            rows=self.num_rows,
            read_rows=self.num_sampled + twins,
            longest=max(sequence.keys.stop - sequence.keys.start for sequence in self.sequences),
            num_sequences=len(self.sequences),
        )

    @property
    def num_sampled(self) -> int:
        return sum(work.eligible.numel() for work in self.works)

    def span_groups(self, chunk: slice) -> tuple[SpanGroup, ...]:
        """What a chunk of consecutive rows attends to; rows count from the chunk's first."""
        counts = []
        for sequence in self.sequences:
            first, last = max(sequence.rows.start, chunk.start), min(sequence.rows.stop, chunk.stop)
            if first < last:
                counts.append((last - first, sequence))
        return _group_spans(counts)

    def read_parts(self, rows_per_part: int) -> Iterator[ReadPart]:
        """The rows to sample, at most `rows_per_part` at a time (two of a guided request)."""
        part = _PartBuilder()
        for read in self.reads:
            done, weight = 0, 1 if read.twin_rows is None else 2
            while done < read.rows.size:
                room = (rows_per_part - part.num_rows) // weight
                if room < 1 and part.num_rows:
                    yield part.finish()
                    part = _PartBuilder()
                    continue
                piece = slice(done, min(done + max(room, 1), read.rows.size))
                part.add(read, piece)
                done = piece.stop
        if part.num_rows:
            yield part.finish()

    def row_groups(self, part: ReadPart, positions: torch.Tensor) -> tuple[RowGroup, ...]:
        """How the rows of a part are sampled, with the part's `positions` on the device."""
        return tuple(
            self._row_group(
                self.canvases[number], part.positions[rows], rows, twins, positions[rows]
            )
            for number, rows, twins in part.pieces
        )

    @staticmethod
    def _row_group(
        canvas: Canvas,
        on_canvas: Array,
        rows: slice,
        twins: slice | None,
        positions: torch.Tensor,
    ) -> RowGroup:
        return RowGroup(
            params=canvas.params,
            scoring=canvas.rule.scoring,
            step=canvas.num_forwards,
            forbid_mask=canvas.rule.forbid_mask,
            rows=rows,
            unconditional_rows=twins,
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
        tokens, scores, greedy = sampled[:3].numpy()
        tokens, greedy = tokens.astype(np.int64), greedy.astype(np.int64)
        found, start = [], 0
        for canvas, work in zip(self.canvases, self.works, strict=True):
            own = slice(start, start + work.eligible.numel())
            found.append(
                Candidates(
                    work.eligible,
                    torch.from_numpy(tokens[own]),
                    torch.from_numpy(scores[own]),
                    torch.from_numpy(greedy[own]),
                    canvas.draws(work.eligible, noise),
                    sampled[3:, own] if canvas.wants_logprobs else None,
                )
            )
            start = own.stop
        return found


def build_batch(canvases: Sequence[Canvas], logit_shift: int) -> StepBatch:
    """Pack what `canvases` need computed in this step, and list the rows to sample.

    Args:
        canvases: the requests of the step.
        logit_shift: 1 where the token at a position is read from the row before it, else 0.
    """
    packing = _Packing()
    ordered = sorted(canvases, key=lambda canvas: canvas.cache is not None)
    works = tuple(canvas.begin() for canvas in ordered)
    reads = tuple(
        packing.add(number, canvas, work, logit_shift)
        for number, (canvas, work) in enumerate(zip(ordered, works, strict=True))
    )
    return StepBatch(
        token_ids=np.concatenate(packing.token_ids),
        positions=np.concatenate(packing.positions),
        slots=np.concatenate([_NO_SLOTS, *packing.slots]),
        sequences=tuple(packing.sequences),
        canvases=tuple(ordered),
        works=works,
        reads=reads,
    )


_NO_SLOTS = np.empty(0, dtype=np.int64)


class _Packing:
    """Rows as they are put one after the other."""

    def __init__(self) -> None:
        self.token_ids: list[Array] = []
        self.positions: list[Array] = []
        self.slots: list[Array] = []
        self.sequences: list[PackedSequence] = []
        self._num_rows = 0

    def add(self, number: int, canvas: Canvas, work: Work, logit_shift: int) -> _Read:
        eligible = work.eligible.numpy()
        predicting = np.maximum(eligible - logit_shift, 0) if logit_shift else eligible
        start, twin_rows, twin = self._num_rows, None, None
        if canvas.cache is None:
            whole = slice(0, canvas.length)
            own = self._append(canvas, canvas.tokens.numpy(), whole)
            if canvas.params.cfg_scale > 0:
                twin_rows = predicting + self._num_rows
                twin = self._append(canvas, canvas.unconditional_tokens().numpy(), whole)
        else:
            # The window starts early enough for the row that predicts its first position.
            window = slice(max(work.rows[0] - logit_shift, 0), work.rows[1])
            own = self._append(canvas, canvas.tokens.numpy(), window, canvas.cache)
            start -= window.start
        on_canvas = eligible - canvas.prompt_length
        return _Read(number, on_canvas, predicting + start, own, twin_rows, twin)

    def _append(
        self, canvas: Canvas, tokens: Array, window: slice, cache: CacheRange | None = None
    ) -> PackedSequence:
        rows = slice(self._num_rows, self._num_rows + window.stop - window.start)
        positions = canvas.positions[window]
        keys = rows
        if cache is not None:
            keys = slice(cache.start, cache.end)
            self.slots.append(positions + cache.start)
        self.token_ids.append(tokens[window])
        self.positions.append(positions)
        self.sequences.append(PackedSequence(rows, keys, cache is not None))
        self._num_rows = rows.stop
        return self.sequences[-1]


class _PartBuilder:
    """Rows to read as they are put one after the other, in the order of the batch."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._rows: list[Array] = []
        self._positions: list[Array] = []
        self._counted: list[tuple[int, PackedSequence]] = []
        self._pieces: list[tuple[int, slice, slice | None]] = []

    def add(self, read: _Read, piece: slice) -> None:
        own = self._append(read.rows[piece], read.positions[piece], read.sequence)
        twins = None
        if read.twin_rows is not None and read.twin_sequence is not None:
            twins = self._append(read.twin_rows[piece], read.positions[piece], read.twin_sequence)
        self._pieces.append((read.request, own, twins))

    def _append(self, rows: Array, positions: Array, sequence: PackedSequence) -> slice:
        place = slice(self.num_rows, self.num_rows + rows.size)
        self._rows.append(rows)
        self._positions.append(positions)
        self._counted.append((rows.size, sequence))
        self.num_rows = place.stop
        return place

    def finish(self) -> ReadPart:
        return ReadPart(
            np.concatenate(self._rows),
            np.concatenate(self._positions),
            _group_spans(self._counted),
            tuple(self._pieces),
        )


def _group_spans(counted: Sequence[tuple[int, PackedSequence]]) -> tuple[SpanGroup, ...]:
    """Span groups of runs of rows: how many, and of which sequence; cached ones come last."""
    groups, start = [], 0
    for is_cached in (False, True):
        spans, end = [], 0
        for count, sequence in counted:
            if sequence.is_cached == is_cached:
                spans.append(Span(end, end + count, sequence.keys.start, sequence.keys.stop))
                end += count
        if spans:
            groups.append(SpanGroup(slice(start, start + end), tuple(spans), is_cached))
        start += end
    return tuple(groups)

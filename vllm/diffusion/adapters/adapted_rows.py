# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step use which adapter.

A step's rows are known once it is packed. Its layers then compute one chunk of rows after the
other, and a product does not know which rows it multiplies. `AdaptedRows` does: whoever takes the
rows of a chunk announces them there, and the products of the chunk read them.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from torch import Tensor

T = TypeVar("T")
# As `SamplePart.pieces`: item, rows of its sequence, rows of its unconditional sequence.
Piece = tuple[int, slice, "slice | None"]


class Run(NamedTuple):
    """Consecutive rows of a chunk, or of a step, that use one slot."""

    slot: int
    start: int
    stop: int


class StepSlots(NamedTuple):
    """The slots that a step uses.

    Attributes:
        of_items: per item of the step, its slot; None for an item without an adapter.
        runs: the rows with an adapter, in ascending order.
    """

    of_items: tuple[int | None, ...] = ()
    runs: tuple[Run, ...] = ()

    @classmethod
    def of(cls, slots: Iterable[int | None], ends: Iterable[int]) -> StepSlots:
        """Return the slots of items whose rows end at `ends`, one item after the other."""
        of_items, start = tuple(slots), 0
        runs = list[Run]()
        for slot, end in zip(of_items, ends, strict=True):
            if slot is not None:
                _append(runs, Run(slot, start, end))
            start = end
        return cls(of_items, tuple(runs))


class AdaptedRows:
    """The rows that the products of a model compute now, by the slots of their adapters.

    Attributes:
        runs: the rows of the current chunk with an adapter, counted from the chunk's first row.
    """

    def __init__(self) -> None:
        self._step = StepSlots()
        self.runs: tuple[Run, ...] = ()

    def computing(
        self, step: StepSlots, work: Generator[float, None, T]
    ) -> Generator[float, None, T]:
        """Run the chunks of a step; other steps may run whenever it yields."""
        runs: tuple[Run, ...] = ()
        with closing(work):
            while True:
                self._step, self.runs = step, runs
                try:
                    seconds = next(work)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    runs = self.runs
                    self._step, self.runs = StepSlots(), ()
                yield seconds

    def turn_to(self, rows: slice) -> None:
        """Announce that the next products compute these rows of the step."""
        self.runs = _within(self._step.runs, rows)

    def within(self, rows: slice) -> tuple[Run, ...]:
        """Return the runs of some rows of the current chunk, counted from the first of them."""
        return _within(self.runs, rows)

    def watch(self, x: Tensor) -> WatchedRows:
        """Return x [T, D], all rows of the step; each chunk that is taken from it is announced."""
        return WatchedRows(x, self)

    def announcing(self, chunks: Sequence[T], rank: int) -> list[T]:
        """Return chunks (`Chunk`); each is announced when an iteration reaches it.

        `rank` is the index of this rank among the ranks that divide the rows of a step.
        """
        return _Announcing(chunks, self, rank)

    def of_parts(self, parts: Iterable[T]) -> Iterator[T]:
        """Yield parts of the sample rows (`SamplePart`); each is announced when it is yielded."""
        for part in parts:
            self.runs = _runs_of(self._step, part.pieces)  # type: ignore[attr-defined]
            yield part

    @contextmanager
    def sampling(self, step: StepSlots, pieces: Sequence[Piece]) -> Iterator[None]:
        """Announce the rows of a part of the sample rows while it is sampled."""
        before, self.runs = self.runs, _runs_of(step, pieces)
        try:
            yield
        finally:
            self.runs = before


class WatchedRows:
    """All rows of a step, as `AdaptedRows.watch` returns them."""

    def __init__(self, x: Tensor, adapted: AdaptedRows) -> None:
        self._x, self._adapted = x, adapted

    def __getitem__(self, rows: slice) -> Any:
        self._adapted.turn_to(rows)
        return self._x[rows]


class _Announcing(list[Any]):
    """Chunks of a stage, as `AdaptedRows.announcing` returns them."""

    def __init__(self, chunks: Iterable[Any], adapted: AdaptedRows, rank: int) -> None:
        super().__init__(chunks)
        self._adapted, self._rank = adapted, rank

    def __iter__(self) -> Iterator[Any]:
        for chunk in super().__iter__():
            self._adapted.turn_to(chunk.places[self._rank])
            yield chunk


def _within(runs: Iterable[Run], rows: slice) -> tuple[Run, ...]:
    """Return the parts of runs within a range of rows, counted from its first row."""
    parts = list[Run]()
    for slot, start, stop in runs:
        first, end = max(start, rows.start), min(stop, rows.stop)
        if first < end:
            parts.append(Run(slot, first - rows.start, end - rows.start))
    return tuple(parts)


def _runs_of(step: StepSlots, pieces: Iterable[Piece]) -> tuple[Run, ...]:
    runs = list[Run]()
    for item, *ranges in pieces:
        slot = step.of_items[item] if step.of_items else None
        for rows in ranges:
            if slot is not None and rows is not None:
                _append(runs, Run(slot, rows.start, rows.stop))
    return tuple(runs)


def _append(runs: list[Run], run: Run) -> None:
    """Append a run, or extend the last one if it continues there."""
    if runs and runs[-1].slot == run.slot and runs[-1].stop == run.start:
        runs[-1] = runs[-1]._replace(stop=run.stop)
    elif run.start < run.stop:
        runs.append(run)

# SPDX-License-Identifier: Apache-2.0
"""Which rows of a step use which adapter.

A step's rows are known once it is packed. Its layers then compute one chunk of rows after the
other, and a product does not know which rows it multiplies. `AdaptedRows` does: whoever takes the
rows of a chunk announces them there, and the products of the chunk read them. A CUDA graph reads
the slots of its rows from a table, which is written before each replay.
"""

from __future__ import annotations

from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from vllm.diffusion import ops

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from torch import Tensor

    from vllm.diffusion.adapters.slot_memory import ProductSlots
    from vllm.diffusion.ops import Array

T = TypeVar("T")
# As `SamplePart.pieces`: item, rows of its sequence, rows of its unconditional sequence.
Piece = tuple[int, slice, "slice | None"]
_TilesOnDevice = dict["RowSlots", "ops.Tiles[Tensor]"]


class Run(NamedTuple):
    """Consecutive rows that use one slot."""

    slot: int
    start: int
    stop: int


class RowSlots(NamedTuple):
    """The slots of the rows of a step, or of a part of its sample rows.

    Attributes:
        runs: the rows with an adapter, in ascending order.
        num_rows: number of all rows.
    """

    runs: tuple[Run, ...] = ()
    num_rows: int = 0

    @classmethod
    def of(cls, slots: Iterable[int | None], ends: Iterable[int]) -> RowSlots:
        """Return the slots of rows that end at `ends`; None for rows without an adapter."""
        runs, start = list[Run](), 0
        for slot, end in zip(slots, ends, strict=True):
            if slot is not None:
                _append(runs, Run(slot, start, end))
            start = end
        return cls(tuple(runs), start)

    def of_rows(self, rows: slice) -> RowSlots:
        """Return the slots of consecutive rows; the first of them becomes row 0."""
        first, last = rows.start, rows.stop
        if (first, last) == (0, self.num_rows):
            return self
        runs = [
            Run(slot, max(start, first) - first, min(stop, last) - first)
            for slot, start, stop in self.runs
            if start < last and first < stop
        ]
        return RowSlots(tuple(runs), last - first)

    def tiles(self, size: int) -> ops.Tiles[Array]:
        """Return the tiles of at most `size` rows."""
        return ops.tiles_of(self.runs, self.num_rows, size)


class StepSlots(NamedTuple):
    """The slots that a step uses.

    Attributes:
        of_items: per item of the step, its slot; None for an item without an adapter.
        rows: the slots of its rows.
        of_drafts: slot of rows that only draft; None if an item's slot is that of all its rows.
    """

    of_items: tuple[int | None, ...] = ()
    rows: RowSlots = RowSlots()
    of_drafts: int | None = None

    def of_ranges(self, ranges: Iterable[tuple[int, int, int]]) -> RowSlots:
        """Return the slots of consecutive ranges of rows.

        Args:
            ranges: per range, the item of the step, the last row + 1, and how many rows at its end
                only draft.
        """
        slots, ends = list[int | None](), list[int]()
        for item, end, num_drafts in ranges:
            slots += (self.of_items[item] if self.of_items else None, self.of_drafts)
            ends += (end if self.of_drafts is None else end - num_drafts, end)
        return RowSlots.of(slots, ends)

    def of_pieces(self, pieces: Iterable[Piece], num_drafts: Iterable[int]) -> RowSlots:
        """Return the slots of a part of the sample rows; arguments as in `SamplePart`."""
        return self.of_ranges(
            (item, rows.stop, count)
            for (item, *ranges), count in zip(pieces, num_drafts, strict=True)
            for rows in ranges
            if rows is not None
        )


class _Current(NamedTuple):
    """The rows that are computed now.

    Attributes:
        table: slots of all rows of the step, or of a part of its sample rows.
        rows: which of these rows are computed.
        slots: the slots of the computed rows.
    """

    table: RowSlots = RowSlots()
    rows: slice = slice(0)
    slots: RowSlots = RowSlots()


class AdaptedRows:
    """The rows that the products of a model compute now, by the slots of their adapters.

    Args:
        num_slots: number of slots.
        device: device of the model.
        draft_slot: slot of rows that only draft; None if they use that of their request.
    """

    def __init__(self, num_slots: int, device: torch.device, draft_slot: int | None = None) -> None:
        self.num_slots, self._device, self.draft_slot = num_slots, device, draft_slot
        self._step, self._current = StepSlots(), _Current()
        self._captured: ops.Tiles[Tensor] | None = None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._uploaded: _TilesOnDevice = {}

    # ---- for products ----

    def use(self, slots: ProductSlots) -> bool:
        """Return whether the current rows may have an adapter that changes a product."""
        if self._captured is not None:
            return True  # any slot may be used when the graph is replayed
        return any(slots.is_changed_by(run.slot) for run in self._current.slots.runs)

    @property
    def tiles(self) -> ops.Tiles[Tensor]:
        """The tiles of the current rows."""
        if self._captured is not None:
            return self._captured._replace(first_row=self._current.rows.start)
        slots = self._current.slots
        tiles = self._uploaded.get(slots)
        if tiles is None:
            on_host = slots.tiles(ops.low_rank_tile(slots.num_rows))
            tiles = self._uploaded[slots] = ops.to_device(on_host, self._device)
        return tiles

    @property
    def side_stream(self) -> torch.cuda.Stream | None:
        """A stream for work next to the products of the model; None outside of a capture."""
        return None if self._captured is None else self._side

    @contextmanager
    def within(self, rows: slice) -> Iterator[None]:
        """Announce some rows of the current chunk, counted from its first row."""
        before, start = self._current, self._current.rows.start
        self._turn_to(before.table, slice(start + rows.start, start + rows.stop))
        try:
            yield
        finally:
            self._current = before

    # ---- for steps ----

    def computing(
        self, step: StepSlots, work: Generator[float, None, T]
    ) -> Generator[float, None, T]:
        """Run the chunks of a step; other steps may run whenever it yields."""
        current, uploaded = _Current(), _TilesOnDevice()
        with closing(work):
            while True:
                self._step, self._current, self._uploaded = step, current, uploaded
                try:
                    seconds = next(work)
                except StopIteration as end:
                    result: T = end.value
                    return result
                finally:
                    current = self._current
                    self._step, self._current, self._uploaded = StepSlots(), _Current(), {}
                yield seconds

    @contextmanager
    def capturing(self, tiles: ops.Tiles[Tensor] | None) -> Iterator[None]:
        """Make the products read these tiles on the device; None for no adapters.

        All rows are computed at once, and the tiles need not be written yet.
        """
        self._captured = tiles
        try:
            yield
        finally:
            self._captured, self._current = None, _Current()

    def turn_to(self, rows: slice) -> None:
        """Announce that the next products compute these rows of the step."""
        self._turn_to(self._step.rows, rows)

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
            slots = self._step.of_pieces(part.pieces, part.num_drafts)  # type: ignore[attr-defined]
            self._turn_to(slots, slice(0, slots.num_rows))
            yield part

    @contextmanager
    def sampling(self, slots: RowSlots) -> Iterator[None]:
        """Announce the rows of a part of the sample rows while it is sampled."""
        before = self._current
        self._turn_to(slots, slice(0, slots.num_rows))
        try:
            yield
        finally:
            self._current = before

    def _turn_to(self, table: RowSlots, rows: slice) -> None:
        rows = slice(rows.start, min(rows.stop, table.num_rows) if table.runs else rows.stop)
        self._current = _Current(table, rows, table.of_rows(rows))


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


def _append(runs: list[Run], run: Run) -> None:
    """Append a run, or extend the last one if it continues there."""
    if runs and runs[-1].slot == run.slot and runs[-1].stop == run.start:
        runs[-1] = runs[-1]._replace(stop=run.stop)
    elif run.start < run.stop:
        runs.append(run)

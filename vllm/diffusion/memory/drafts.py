# SPDX-License-Identifier: Apache-2.0
"""Steps whose chunks are not chosen yet: bytes of a row in every stage, and rows that fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.core.buffers import row_bytes
from vllm.diffusion.memory.footprint import ROUNDING_BYTES
from vllm.diffusion.memory.plan import TILE_ROWS, ChunkRows, even_chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.diffusion.memory.footprint import Footprint, Phases, StepShape
    from vllm.diffusion.memory.plan import Residency

MIN_CHUNK_ROWS = 16
# Up to here a step that fits runs as a whole. Beyond, the row-wise stages gain nothing from longer
# chunks than `FULL_SPEED_ROWS`, so they take no more memory than attention does.
WHOLE_STEP_ROWS = 16_384
FULL_SPEED_ROWS = 4_096
ATTEND_PARTS = (1, 2, 4)  # of its longest chunks that are tried


class StageBytes(NamedTuple):
    """Bytes of a row in a stage's chunk.

    Attributes:
        buffers: bytes of the pool; all bytes, where the pool is not split.
        temporaries: bytes that PyTorch allocates, where the pool is split.
        few_buffers, few_rows: bytes of the pool in a chunk of at most `few_rows` rows, if more.
    """

    buffers: int
    temporaries: int
    few_buffers: int = 0
    few_rows: int = 0

    @classmethod
    def of(cls, phases: Phases, is_split: bool) -> StageBytes:
        if not is_split:
            return cls(max(map(row_bytes, phases)), 0)
        return cls(
            max(row_bytes(phase, is_temporary=False) for phase in phases),
            max(row_bytes(phase, is_temporary=True) for phase in phases),
        )

    @classmethod
    def of_feed_forward(cls, footprint: Footprint, layout: Residency, is_split: bool) -> StageBytes:
        few = cls.of(footprint.feed_forward(layout), is_split)
        few_rows = footprint.shape.most_gated_rows
        if few_rows is None:
            return few
        many = cls.of(footprint.feed_forward(layout, is_long=True), is_split)
        return many._replace(few_buffers=few.buffers, few_rows=few_rows)

    def buffers_in(self, rows: int) -> int:
        """Bytes of the pool for a chunk of `rows` rows, or for a shorter last one, if more."""
        return max(rows * self.buffers, min(rows, self.few_rows) * self.few_buffers)

    def rows_in(self, buffers: int, temporaries: int) -> int:
        """Number of rows that fit into these bytes of the pool and of temporaries."""
        is_few = buffers < self.few_rows * self.few_buffers
        rows = buffers // (self.few_buffers if is_few else self.buffers)
        return min(rows, temporaries // self.temporaries) if self.temporaries else rows


class RowBytes(NamedTuple):
    """Bytes of a row: for the step, for a sample row, and for a chunk of every stage.

    `collected` counts per kept key; `split` is what attention of few rows takes in all.
    """

    resident: int
    results: int
    collected: int
    split: int
    keys_values: StageBytes
    attend: StageBytes
    feed_forward: StageBytes
    read: StageBytes

    @property
    def stages(self) -> tuple[StageBytes, StageBytes, StageBytes, StageBytes]:
        return self.keys_values, self.attend, self.feed_forward, self.read

    @classmethod
    def of(
        cls, footprint: Footprint, layout: Residency, is_packed: bool, *, is_split: bool
    ) -> RowBytes:
        return cls(
            row_bytes(footprint.resident(layout)),
            row_bytes(footprint.read_results(layout)),
            footprint.collected_keys(layout),
            footprint.shape.split_bytes,
            StageBytes.of(footprint.keys_values(layout), is_split),
            StageBytes.of(footprint.attend(layout, is_packed=is_packed), is_split),
            StageBytes.of_feed_forward(footprint, layout, is_split),
            StageBytes.of(footprint.read(layout, is_packed=is_packed), is_split),
        )


class PlanCandidate:
    """A way to keep a step's rows, with its chunks not chosen yet.

    Args:
        layout: the way to keep them.
        step: the step.
        row_bytes: bytes of a row in this layout.
        most_read: rows that may have logits at a time.
        longest: most rows of a chunk of every stage, however much memory there is.
        attend_chunk: function of the rows that attend and the most rows of a chunk that returns the
            rows of a chunk.
    """

    def __init__(
        self,
        layout: Residency,
        step: StepShape,
        row_bytes: RowBytes,
        most_read: int,
        longest: ChunkRows,
        attend_chunk: Callable[[int, int], int],
    ) -> None:
        self.layout, self.step, self._of_row = layout, step, row_bytes
        self._resident = row_bytes.resident * step.rows + row_bytes.results * step.sample_rows
        self._resident += row_bytes.collected * step.kept_keys + row_bytes.split + ROUNDING_BYTES
        if step.rows <= WHOLE_STEP_ROWS:  # what attention has returned lies beside the logits
            beside = step.rows * row_bytes.attend.temporaries // row_bytes.read.buffers
            most_read = max(most_read - beside, min(most_read, TILE_ROWS))
        most_read = min(step.sample_rows, most_read, longest.read)
        self._longest, self._attend_chunk = longest._replace(read=most_read), attend_chunk

    @property
    def smallest_bytes(self) -> int:
        return self.bytes_with(MIN_CHUNK_ROWS)

    def bytes_with(self, chunk_rows: int) -> int:
        """Bytes of the step with chunks of at most `chunk_rows` rows, or the smallest allowed."""
        return max(self.peaks(self._at_most(max(chunk_rows, MIN_CHUNK_ROWS))))

    @property
    def whole_bytes(self) -> int:
        return max(self.peaks(self._at_most(self.step.rows)))

    def _at_most(self, rows: int) -> ChunkRows:
        """Chunks of at most `rows` rows in every stage."""
        return self._longest.at_most(ChunkRows.equal(rows))

    def ways_to_cut(self, available: int) -> Iterator[ChunkRows]:
        """Yield chunks that fit into `available` bytes.

        In a split pool, long chunks of attention may leave other stages too few bytes of one kind.
        """
        parts = ATTEND_PARTS if self._of_row.attend.temporaries else (1,)
        return (self.sizes(available, part) for part in parts)

    def sizes(self, available: int, attend_part: int = 1) -> ChunkRows:
        """Return the longest chunks that fit into `available` bytes; attention comes first.

        The other stages use the buffers and temporaries that attention leaves.

        Args:
            available: bytes.
            attend_part: divisor of the rows that attention could take.
        """
        rows, of_row, free = self.step.rows, self._of_row, available - self._resident
        longest = self._longest
        fitting = free // (attend_part * sum(of_row.attend))
        attend = self._attend_chunk(rows, max(min(fitting, longest.attend), 1))
        attending = attend * of_row.attend.buffers
        temporaries = attend * of_row.attend.temporaries
        enough_rows = rows if rows <= WHOLE_STEP_ROWS else FULL_SPEED_ROWS
        of_others = max(of_row.keys_values.temporaries, of_row.feed_forward.temporaries)
        temporaries = min(max(temporaries, enough_rows * of_others), free - attending)
        buffers = free - temporaries
        if rows > WHOLE_STEP_ROWS:
            enough = of_row.feed_forward.buffers_in(FULL_SPEED_ROWS)
            buffers = min(buffers, max(attending, enough))
        fitting = of_row.feed_forward.rows_in(buffers, temporaries)
        feed_forward = even_chunk(rows, min(fitting, longest.feed_forward))
        fitting = of_row.keys_values.rows_in(buffers, temporaries)
        most_read = max(min(longest.read, attend, feed_forward), 1)
        return ChunkRows(
            even_chunk(rows, min(fitting, longest.keys_values)),
            attend,
            feed_forward,
            even_chunk(most_read, of_row.read.rows_in(buffers, temporaries)),
        )

    def peaks(self, sizes: ChunkRows) -> tuple[int, int, int, int]:
        """Bytes in use during each stage, with what is resident."""
        rows = ChunkRows.equal(self.step.rows)._replace(read=self.step.sample_rows)
        stages = list(zip(sizes.at_most(rows), self._of_row.stages, strict=True))
        stays = self._resident + max(count * stage.temporaries for count, stage in stages)
        keys_values, attend, feed_forward, read = (
            stays + stage.buffers_in(count) for count, stage in stages
        )
        return keys_values, attend, feed_forward, read

# SPDX-License-Identifier: Apache-2.0
"""A plan: how the rows of one step are cut into chunks.

This module imports no torch or upstream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


class Residency(NamedTuple):
    """Data that stays on the device for a whole step.

    Attributes:
        keep_queries: whether queries and rotary tables are computed once for all rows, instead of
            by every chunk for itself.
        head_groups: G; keys and values of one group of heads exist at a time.
        host_residual: whether the residual stream is in host memory and visits the device in
            chunks.
        shards: N ranks divide the rows, and each has all keys and values of its part of the heads
            of a group. Row counts then refer to one rank.
        fp8_attention: whether queries, keys, values and results of attention are fp8.
    """

    keep_queries: bool
    head_groups: int = 1
    host_residual: bool = False
    shards: int = 1
    fp8_attention: bool = False

    @property
    def is_streamed(self) -> bool:
        """Whether layers run in head groups or row shares, from host memory, or with fp8 keys."""
        apart = self.host_residual or self.fp8_attention
        return self.head_groups > 1 or self.shards > 1 or apart


class PerStage(NamedTuple, Generic[T]):
    """A value for every stage: three stages of the layers, then the rows with logits."""

    keys_values: T
    attend: T
    feed_forward: T
    logits: T

    @classmethod
    def equal(cls, value: T) -> PerStage[T]:
        return PerStage(*[value] * 4)


ChunkRows: TypeAlias = PerStage[int]  # rows of a chunk
StageSeconds: TypeAlias = PerStage[float]  # predicted seconds, for a step, a layer or a chunk

_NO_SECONDS = StageSeconds.equal(0.0)


@dataclass(frozen=True)
class Plan:
    """Rows per chunk of every stage of one step, and the data that stays on the device.

    Attributes:
        layout: data that stays. If it divides the rows between ranks, all other fields refer to
            one rank.
        rows: rows per chunk of every stage, including sample rows.
        predicted_peak_bytes: bytes on the device, including data that requests keep between steps.
        predicted_average_bytes: average bytes, weighted by predicted time.
        predicted_seconds: seconds of the step.
        chunk_seconds: seconds of one chunk of every stage.
    """

    layout: Residency
    rows: ChunkRows
    predicted_peak_bytes: int = 0
    predicted_average_bytes: int = 0
    predicted_seconds: float = 0.0
    chunk_seconds: StageSeconds = _NO_SECONDS

    @property
    def sizes(self) -> tuple[object, ...]:
        """Key of the sizes of a layer's buffers, in addition to the rows of the step."""
        return self.layout, *self.rows[:3]

    def is_whole(self, num_rows: int) -> bool:
        """Whether every stage of a layer processes `num_rows` rows as one chunk."""
        return self.layout.keep_queries and min(self.rows[:3]) >= num_rows

    def resized(self, num_rows: int) -> Plan:
        """Return this plan with whole stages of `num_rows` rows."""
        return replace(self, rows=ChunkRows.equal(num_rows)._replace(logits=self.rows.logits))

    def __str__(self) -> str:
        """Describe the plan on one line."""
        names, layout = ("keys-values", "attend", "feed-forward", "logits"), self.layout
        rows = (f"{name} {size}" for name, size in zip(names, self.rows, strict=True))
        extras = [f"{layout.head_groups} head groups"] if layout.head_groups > 1 else []
        extras += ["residual in host memory"] if layout.host_residual else []
        extras += [f"rows divided over {layout.shards} ranks"] if layout.shards > 1 else []
        extras += ["fp8 attention"] if layout.fp8_attention else []
        return (
            f"rows a chunk: {', '.join(rows)}{''.join(f'; {extra}' for extra in extras)}; "
            f"predicted peak {readable(self.predicted_peak_bytes)}, "
            f"time {self.predicted_seconds:.3g} s"
        )


def chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `rows_per_chunk` rows that cover `num_rows` rows."""
    for start in range(0, num_rows, rows_per_chunk):
        yield slice(start, min(start + rows_per_chunk, num_rows))


def readable(num_bytes: int) -> str:
    """Format a number of bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"

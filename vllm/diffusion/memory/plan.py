# SPDX-License-Identifier: Apache-2.0
"""A plan: how the rows of one step are cut into chunks. Nothing here imports torch or upstream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from vllm.diffusion.memory.footprint import Layout, is_streamed

if TYPE_CHECKING:
    from collections.abc import Iterator


class StageSeconds(NamedTuple):
    """Predicted seconds of every stage; of the stages of a layer, of one layer or a part of it."""

    keys_values: float = 0.0
    attend: float = 0.0
    feed_forward: float = 0.0
    read: float = 0.0


_NO_SECONDS = StageSeconds()


@dataclass(frozen=True)
class Plan:
    """Rows per chunk of every stage of one step, and what stays on the device.

    Attributes:
        keep_queries: queries are computed together with keys and values and kept for the step.
        keys_values_rows, attend_rows, feed_forward_rows: chunk sizes, in rows.
        logits_rows: rows that are read after the last layer at a time.
        head_groups: keys and values of one of so many groups of heads exist at a time.
        host_residual: the residual stream lies in host memory.
        predicted_peak_bytes: of the device, with what requests keep between steps.
        predicted_average_bytes: weighted by predicted time.
        predicted_seconds: of the step.
        chunk_seconds: of one chunk of every stage.
        shards: ranks that divide the rows; chunks are those of a rank, and so is all else.
    """

    keep_queries: bool
    keys_values_rows: int
    attend_rows: int
    feed_forward_rows: int
    logits_rows: int
    head_groups: int = 1
    host_residual: bool = False
    predicted_peak_bytes: int = 0
    predicted_average_bytes: int = 0
    predicted_seconds: float = 0.0
    chunk_seconds: StageSeconds = _NO_SECONDS
    shards: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """What the sizes of a layer's buffers follow from, besides the rows of the step."""
        rows = (self.keys_values_rows, self.attend_rows, self.feed_forward_rows)
        return (*rows, self.head_groups, self.host_residual, self.keep_queries, self.shards)

    @property
    def is_streamed(self) -> bool:
        """Layers run by groups of heads, on rows that come from the host, or over ranks."""
        return is_streamed(self._layout)

    @property
    def _layout(self) -> Layout:
        return Layout(self.keep_queries, self.head_groups, self.host_residual, self.shards)

    def is_whole(self, num_rows: int) -> bool:
        """Whether every stage of a layer takes `num_rows` rows as one chunk."""
        sizes = (self.keys_values_rows, self.attend_rows, self.feed_forward_rows)
        return self.keep_queries and min(sizes) >= num_rows

    def resized(self, num_rows: int) -> Plan:
        """The same plan for a whole step of `num_rows` rows."""
        return replace(
            self, keys_values_rows=num_rows, attend_rows=num_rows, feed_forward_rows=num_rows
        )

    def __str__(self) -> str:
        """The plan in words and numbers, on one line."""
        rows = (
            f"{name} {size}"
            for name, size in (
                ("keys-values", self.keys_values_rows),
                ("attend", self.attend_rows),
                ("feed-forward", self.feed_forward_rows),
                ("logits", self.logits_rows),
            )
        )
        extras = [f"{self.head_groups} head groups"] if self.head_groups > 1 else []
        extras += ["residual in host memory"] if self.host_residual else []
        extras += [f"rows divided over {self.shards} ranks"] if self.shards > 1 else []
        return (
            f"rows a chunk: {', '.join(rows)}{''.join(f'; {extra}' for extra in extras)}; "
            f"predicted peak {readable(self.predicted_peak_bytes)}, "
            f"time {self.predicted_seconds:.3g} s"
        )


def chunks(num_rows: int, rows_per_chunk: int) -> Iterator[slice]:
    """Consecutive slices of at most `rows_per_chunk` rows that cover `num_rows` rows."""
    for start in range(0, num_rows, rows_per_chunk):
        yield slice(start, min(start + rows_per_chunk, num_rows))


def readable(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} bytes"

# SPDX-License-Identifier: Apache-2.0
"""Which rows attend to which, as ranges that a batch passes to attention.

Letters: R query rows, N rows of keys and values, S sequences, KV key/value heads of this rank, hd
head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

A = TypeVar("A")  # torch.Tensor on the device, an array on the host


class Span(NamedTuple):
    """Queries of one sequence and the keys that they read, as half-open row ranges.

    `q_start` and `q_end` are rows of the queries, `kv_start` and `kv_end` are rows of the keys and
    values. Without a grid of blocks, every query reads all of the keys. With a grid, a query reads
    the keys of its own block and of the blocks before.

    Attributes:
        block_length: keys of a block, counted from the first key; 0 without a grid.
        first: index of the key at the position of the first query, counted from the first key. The
            other queries follow. Without a grid, that of the first query of the whole sequence.
        in_pages: whether the keys are numbered as in a `PageTable`.
        block_start: for queries of a block behind a causal context: keys before the block; else -1.
    """

    q_start: int
    q_end: int
    kv_start: int
    kv_end: int
    block_length: int = 0
    first: int = 0
    in_pages: bool = False
    block_start: int = -1

    @property
    def num_queries(self) -> int:
        return self.q_end - self.q_start

    @property
    def num_keys(self) -> int:
        return self.kv_end - self.kv_start

    def keys_read_by(self, query: int) -> int:
        """Return how many of the first keys a query reads; queries count from `q_start`."""
        if not self.block_length:
            return self.num_keys
        block = (self.first + query) // self.block_length
        return min((block + 1) * self.block_length, self.num_keys)


class PageTable(NamedTuple):
    """Location of keys and values that are kept in pages.

    Key j, in the numbering of `Span` and `key_starts`, is row rows[j // size] + j % size of the
    keys and values. The keys of a sequence start at the beginning of a page.
    """

    rows: Tensor  # [E] int32 on the device: the first row of every page
    size: int  # rows of a page
    # [E] int32, the same for layers with a window; None if all layers have the same pages
    window_rows: Tensor | None = None

    @property
    def of_window(self) -> PageTable:
        """The table of layers with a window; entries outside of the window are undefined."""
        return self if self.window_rows is None else PageTable(self.window_rows, self.size)

    def rows_of(self, start: int, end: int) -> Tensor:
        """Return rows [end - start] int32 of keys `start` to `end`; a page starts at `start`."""
        pages = self.rows[start // self.size : -(-end // self.size), None]
        rows = pages + torch.arange(self.size, dtype=torch.int32, device=pages.device)
        return rows.flatten()[: end - start]


class AttentionLayout(NamedTuple, Generic[A]):
    """Assignment of query rows to key rows: S sequences, each with its own queries and keys.

    The queries of the sequences tile R query rows in order. The keys of a sequence are any range
    of the N key rows, or of the rows that `pages` lists; a sequence without keys gets zeros.
    Without `block_lengths` a query reads all keys of its sequence, with them the keys described in
    `Span`. A captured graph reads the tensors again at every replay, so their contents may change
    within the two maxima.

        rows of a chunk     |... other layout ...|  q of 0  |   q of 1   |
        `rows`                                   [start, ................ stop)
        query_ends                               0          8            20
    """

    query_ends: A  # [S + 1] int32: 0, then the end of each sequence's queries
    key_starts: A  # [S + 1] int32: first key row of each; the last is not read
    key_counts: A  # [S] int32: keys of each sequence, from its first
    max_queries: int  # upper bound of the queries of a sequence
    max_keys: int  # upper bound of the keys of a sequence
    spans: list[Span] | None  # the sequences on the host; None in a captured graph
    pages: PageTable | None = None  # None: the keys of a sequence are one range of rows
    block_lengths: A | None = None  # [S] int32, `Span.block_length` of each
    firsts: A | None = None  # [S] int32, `Span.first` of each
    rows: slice = slice(None)  # the R query rows, among the rows of a chunk

    @staticmethod
    def packed(
        runs: Iterable[Span], pages: PageTable | None = None, start: int = 0
    ) -> AttentionLayout[Any]:
        """Lay out runs of queries one after the other, starting at row `start` of a chunk.

        Only the number of a run's queries is used. The result contains arrays on the host.
        """
        spans, end, max_queries = list[Span](), 0, 0
        for q_start, q_end, *keys in runs:
            num_queries = q_end - q_start
            spans.append(Span._make((end, end + num_queries, *keys)))
            max_queries, end = max(max_queries, num_queries), end + num_queries
        columns = zip(*spans, strict=True) if spans else [()] * 8
        _, ends, starts, stops, blocks, firsts, _, block_starts = columns
        counts = [stop - start for start, stop in zip(starts, stops, strict=True)]
        has_blocks = any(blocks) or any(start >= 0 for start in block_starts)
        return AttentionLayout(
            query_ends=np.array((0, *ends), dtype=np.int32),
            key_starts=np.array((*starts, 0), dtype=np.int32),
            key_counts=np.array(counts, dtype=np.int32),
            max_queries=max_queries,
            max_keys=max(counts, default=0),
            spans=spans,
            pages=pages,
            block_lengths=np.array(blocks, dtype=np.int32) if has_blocks else None,
            firsts=np.array(firsts, dtype=np.int32) if has_blocks else None,
            rows=slice(start, start + end),
        )

    @staticmethod
    def of(
        spans: Sequence[Span], device: torch.device | str, pages: PageTable | None = None
    ) -> AttentionLayout[Tensor]:
        """Return the layout of `spans`, copied to `device`.

        Raises:
            ValueError: the queries of the spans do not follow one another from row 0.
        """
        check_tiling(spans)
        host = AttentionLayout.packed(spans, pages)
        moved: dict[str, Any] = {
            name: torch.from_numpy(array).to(device)
            for name, array in host._asdict().items()
            if isinstance(array, np.ndarray)
        }
        return host._replace(**moved)


def lay_out(runs: Iterable[Span], pages: PageTable) -> tuple[AttentionLayout[Any], ...]:
    """Lay out the rows of a chunk, given as ordered runs, with one layout per location of keys.

    The results contain arrays on the host.
    """
    layouts, start = [], 0
    for in_pages, group in groupby(runs, attrgetter("in_pages")):
        layouts.append(AttentionLayout.packed(group, pages if in_pages else None, start))
        start = layouts[-1].rows.stop
    return tuple(layouts)


def check_tiling(spans: Sequence[Span], num_rows: int | None = None) -> None:
    """Refuse spans whose queries do not tile the rows 0..num_rows-1 in order.

    Raises:
        ValueError: there is a gap, an overlap, a remaining row, or an end before its start.
    """
    ends = [0, *(span.q_end for span in spans)]
    ordered = all(span.q_start <= span.q_end and span.kv_start <= span.kv_end for span in spans)
    tiled = ordered and [span.q_start for span in spans] == ends[:-1]
    if not tiled or (num_rows is not None and ends[-1] != num_rows):
        rows = "the" if num_rows is None else str(num_rows)
        raise ValueError(f"spans: wanted ranges that tile {rows} query rows, given {list(spans)}")


class KeyTarget(NamedTuple):
    """Destination of the keys and values of the last rows of a chunk.

    Attributes:
        k, v: [N, KV, hd], buffers of the store, which are written.
        slots: [S] int64, the store's row for each of the last S rows; negative to skip a row.
        copies: [C, S] int64, further rows of the store for the same keys and values; the first
            negative entry of a row ends them.
    """

    k: Tensor
    v: Tensor
    slots: Tensor
    copies: Tensor | None = None


class KeySource(NamedTuple):
    """Keys and values that rows of a chunk read.

    Attributes:
        k, v: [N, KV, hd].
        layout: the rows, and the keys that each sequence reads.
    """

    k: Tensor
    v: Tensor
    layout: AttentionLayout[Tensor]


@dataclass(frozen=True)
class HeadGroup:
    """One of several equal groups of key/value heads, with the query heads that read them."""

    index: int
    count: int

    def part(self, size: int) -> slice:
        """Return this group's part of `size` heads, or of channels of heads."""
        share = size // self.count
        return slice(self.index * share, (self.index + 1) * share)

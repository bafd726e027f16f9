# SPDX-License-Identifier: Apache-2.0
"""Which rows attend to which, as ranges that a batch gives to attention.

Letters: R query rows, N rows of the keys and values, S sequences, KV key/value heads of this rank,
hd head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Span(NamedTuple):
    """Queries of one sequence and the keys that they read, as half-open row ranges.

    `q_start`, `q_end` are rows of the queries, `kv_start`, `kv_end` rows of the keys and values;
    where these lie in pages, rows as a `PageTable` counts them. Every query reads all of the keys,
    unless they are on a grid of blocks: then a query reads those of its own block and of the blocks
    before.

    Attributes:
        block_length: keys of a block, counted from the first key; 0 where there is no grid.
        first: index of the key beside which the first query stands, counted from the first key. The
            other queries follow.
    """

    q_start: int
    q_end: int
    kv_start: int
    kv_end: int
    block_length: int = 0
    first: int = 0

    @property
    def num_queries(self) -> int:
        return self.q_end - self.q_start

    @property
    def num_keys(self) -> int:
        return self.kv_end - self.kv_start

    def keys_read_by(self, query: int) -> int:
        """Number of keys, from the first one, that a query reads; it is counted from `q_start`."""
        if not self.block_length:
            return self.num_keys
        block = (self.first + query) // self.block_length
        return min((block + 1) * self.block_length, self.num_keys)


class PageTable(NamedTuple):
    """Location of keys and values that are kept in pages.

    Key j, as `Span` and `key_starts` count them, is the row rows[j // size] + j % size of the keys
    and values. The keys of a sequence start with a page.
    """

    rows: Tensor  # [E] int32 on the device: the first row of every page
    size: int  # rows of a page

    def rows_of(self, start: int, end: int) -> Tensor:
        """Rows [end - start] int32 of keys `start` to `end`, the first of which begins a page."""
        pages = self.rows[start // self.size : -(-end // self.size), None]
        rows = pages + torch.arange(self.size, dtype=torch.int32, device=pages.device)
        return rows.flatten()[: end - start]


class AttentionLayout(NamedTuple):
    """Assignment of query rows to key rows: S sequences, each with queries and keys of its own.

    The queries of the sequences tile the R query rows in order. The keys of a sequence are any
    range of the N key rows, or of those that `pages` names; a sequence without keys gets zeros.
    Without `block_lengths` a query reads all keys of its sequence, with them as `Span` says. A
    captured graph reads the tensors again at every replay, so what they hold may change, within
    the two bounds.
    """

    query_ends: Tensor  # [S + 1] int32 on the device: 0, then the end of each sequence's queries
    key_starts: Tensor  # [S + 1] int32 on the device: first key row of each; the last is not read
    key_counts: Tensor  # [S] int32 on the device: keys of each sequence, from its first
    max_queries: int  # at least the queries of every sequence
    max_keys: int  # at least the keys of every sequence
    spans: tuple[Span, ...] | None  # the same on the host; None in a captured graph
    pages: PageTable | None = None  # None: the keys of a sequence are one range of rows
    block_lengths: Tensor | None = None  # [S] int32 on the device, `Span.block_length` of each
    firsts: Tensor | None = None  # [S] int32 on the device, `Span.first` of each

    @classmethod
    def of(
        cls, spans: Sequence[Span], device: torch.device | str, pages: PageTable | None = None
    ) -> AttentionLayout:
        """Make the layout of `spans`, copied to `device`.

        Raises:
            ValueError: the queries of the spans do not follow one another from row 0.
        """
        spans = tuple(spans)
        check_tiling(spans)
        key_counts = [span.num_keys for span in spans]
        has_blocks = any(span.block_length for span in spans)

        def on_device(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return cls(
            query_ends=on_device([0, *(span.q_end for span in spans)]),
            key_starts=on_device([*(span.kv_start for span in spans), 0]),
            key_counts=on_device(key_counts),
            max_queries=max((span.num_queries for span in spans), default=0),
            max_keys=max(key_counts, default=0),
            spans=spans,
            pages=pages,
            block_lengths=on_device([s.block_length for s in spans]) if has_blocks else None,
            firsts=on_device([span.first for span in spans]) if has_blocks else None,
        )


def check_tiling(spans: Sequence[Span], num_rows: int | None = None) -> None:
    """Refuse spans whose queries do not tile the rows 0..num_rows-1 in order.

    Raises:
        ValueError: a gap, an overlap, a row left over, or an end before its start.
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
        slots: [S] int64, the store's row of each of the last S rows; negative for none.
    """

    k: Tensor
    v: Tensor
    slots: Tensor


class KeySource(NamedTuple):
    """Rows of a chunk, and the keys and values that they read.

    Attributes:
        rows: rows of the chunk.
        k, v: [N, KV, hd].
        layout: which of them each sequence reads; its queries count from the first of `rows`.
    """

    rows: slice
    k: Tensor
    v: Tensor
    layout: AttentionLayout


@dataclass(frozen=True)
class HeadGroup:
    """One of several equal groups of key/value heads, with the query heads that read them."""

    index: int
    count: int

    def part(self, size: int) -> slice:
        """Return this group's part of `size` heads, or channels of heads."""
        share = size // self.count
        return slice(self.index * share, (self.index + 1) * share)

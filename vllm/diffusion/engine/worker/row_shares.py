# SPDX-License-Identifier: Apache-2.0
"""Division of a step's rows between ranks.

Rank r has the r-th of equal shares of consecutive rows; the last shares may be shorter or empty.
All ranks cut a share of full length into the same chunks and skip rows that they do not have, so
all ranks meet in every chunk of attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.diffusion.engine.worker.sample_rows import EMPTY_PART
from vllm.diffusion.memory import chunks
from vllm.diffusion.parallel.head_exchange import HeadExchange

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.engine.worker.sample_rows import SamplePart
    from vllm.diffusion.memory import Plan
    from vllm.diffusion.ops import Array
    from vllm.diffusion.parallel.groups import RankGroup, Ranks


# In the last layer, fp8 attention processes a multiple of this many rows.
FP8_UNIT = 1024


class Chunk(NamedTuple):
    """Rows that pass through a stage at a time.

    Attributes:
        rows: rows of a share of full length, counted from the start of the share.
        local: the part of these rows in this rank's share.
        places: per rank, its rows of the chunk, as rows of the step.
        exchange: exchange of attention heads between ranks; None for a single rank.
    """

    rows: slice
    local: slice
    places: list[slice]
    exchange: HeadExchange | None


class RowPartition:
    """Shares of the rows of one step.

    Args:
        ranks: ranks that divide the step; a single rank has all rows.
        num_rows: number of rows of the step.

    Attributes:
        peers: the ranks.
        num_rows: number of rows of the step.
        longest: rows of the longest share.
        shares: per rank, its rows of the step.
    """

    def __init__(self, ranks: Ranks, num_rows: int) -> None:
        self.peers = ranks.sequence
        self.shares = ranks.rows(num_rows)
        self.longest, self.num_rows = self.shares[0].stop, num_rows

    @property
    def local(self) -> slice:
        """The rows of the step in this rank's share."""
        return self.shares[self.peers.rank]

    def chunks(self, rows_per_chunk: int) -> list[Chunk]:
        """Cut all rows of the step into chunks."""
        return [self._chunk(rows) for rows in chunks(self.longest, rows_per_chunk)]

    def narrowed(self, all_chunks: Sequence[Chunk], rows: Array, unit: int = 1) -> list[Chunk]:
        """Narrow chunks to ranges that contain some of `rows` [R] of the step; drop empty ones.

        Ranges begin and end at multiples of `unit` rows of the share, or at the ends of their
        chunks.
        """
        places, narrow = self.in_share(rows), []
        for chunk in all_chunks:
            inside = places[(places >= chunk.rows.start) & (places < chunk.rows.stop)]
            if inside.size:
                start = int(inside.min()) // unit * unit
                stop = (int(inside.max()) // unit + 1) * unit
                local = slice(max(start, chunk.rows.start), min(stop, chunk.rows.stop))
                narrow.append(self._chunk(local))
        return narrow

    def _chunk(self, rows: slice) -> Chunk:
        """Make the chunk for these rows of a share of full length."""
        first = self.local.start
        places = [
            slice(*(min(share.start + row, share.stop) for row in (rows.start, rows.stop)))
            for share in self.shares
        ]
        local = places[self.peers.rank]
        counts = [place.stop - place.start for place in places]
        exchange = HeadExchange(self.peers, counts) if self.peers.size > 1 else None
        return Chunk(rows, slice(local.start - first, local.stop - first), places, exchange)

    def in_share(self, rows: Array) -> Array:
        """Return the offset [R] of each row of the step in its share."""
        places: Array = rows % self.longest
        return places

    def on_rank(self, rows: Array) -> Array:
        """Return the rank [R] whose share contains each row of the step."""
        ranks: Array = rows // self.longest
        return ranks


class StageChunks(NamedTuple):
    """Chunks of every stage of a step; for the last layer, only chunks with sample rows.

    If the model routes rows to experts by windows, chunks hold whole windows in the last layer,
    too.
    """

    keys_values: list[Chunk]
    attend: list[Chunk]
    feed_forward: list[Chunk]
    last_attend: list[Chunk]
    last_feed_forward: list[Chunk]

    @classmethod
    def of(
        cls,
        division: RowPartition,
        plan: Plan,
        parts: Sequence[SamplePart[Array]],
        *,
        in_windows: bool = False,
    ) -> StageChunks:
        """Cut a step as planned; `parts` are its sample rows."""
        attend = division.chunks(plan.rows.attend)
        # Every new number of rows costs setup time before fp8 attention can start.
        unit = FP8_UNIT if plan.layout.fp8_attention else 1
        feed_forward = division.chunks(plan.rows.feed_forward)
        rows = np.concatenate([_NO_ROWS, *(part.rows for part in parts)])
        return cls(
            division.chunks(plan.rows.keys_values),
            attend,
            feed_forward,
            attend if in_windows else division.narrowed(attend, rows, unit),
            feed_forward if in_windows else division.narrowed(feed_forward, rows),
        )


class LogitsExchange(NamedTuple):
    """Sample rows that the ranks process in one round, one part per rank.

    Attributes:
        part: this rank's part; None if no part is left.
        given: [g] int64, rows of this rank's share that the parts of all ranks need, part by part.
        sent: per rank, the number of these rows that its part needs.
        received: per rank, the number of its rows that this rank's part needs, in the order of the
            part's rows.
    """

    part: SamplePart[Array] | None
    given: Array
    sent: list[int]
    received: list[int]

    @property
    def positions(self) -> Array:
        """Canvas positions [r] int64 of this rank's part."""
        return _NO_ROWS if self.part is None else self.part.positions


def to_first(parts: Sequence[SamplePart[Array]], size: int) -> list[SamplePart[Array]]:
    """Assign all parts to the first of `size` ranks, and empty parts to the other ranks."""
    return [dealt for part in parts for dealt in (part, *[EMPTY_PART] * (size - 1))]


def rounds_of(parts: Sequence[SamplePart[Array]], division: RowPartition) -> list[LogitsExchange]:
    """Assign the parts, whose rows ascend, to the ranks in turn."""
    rank, size = division.peers.rank, division.peers.size
    rounds = []
    for first in range(0, len(parts), size):
        round_parts = parts[first : first + size]
        sent_rows = [
            division.in_share(p.rows[division.on_rank(p.rows) == rank]) for p in round_parts
        ]
        part = round_parts[rank] if rank < len(round_parts) else None
        owners = division.on_rank(_NO_ROWS if part is None else part.rows)
        sent = [rows.size for rows in sent_rows] + [0] * (size - len(round_parts))
        received = np.bincount(owners, minlength=size).tolist()
        rounds.append(LogitsExchange(part, np.concatenate(sent_rows), sent, received))
    return rounds


def gathered(
    table: torch.Tensor, parts: Sequence[SamplePart[Array]], peers: RankGroup
) -> torch.Tensor:
    """Gather the samples of all ranks, in the order of the parts.

    Each column is the record of one sample.

    Args:
        table: [3 or more, n], the table of `Samples` of this rank's parts, one after the other.
        parts: all parts of the step, at least one; rank r has sampled every size-th part, starting
            with the r-th.
        peers: the ranks.
    """
    counts = [part.num_sampled for part in parts]
    width = max(sum(counts[rank :: peers.size]) for rank in range(peers.size))
    # Only some parts may have rows of log probabilities, so the heights may differ.
    height = -peers.all_reduce_min(-table.shape[0])
    padded = table.new_zeros(height, width)
    padded[: table.shape[0], : table.shape[1]] = table
    of_ranks = peers.gather(padded)
    ends, pieces = [0] * peers.size, []
    for number, count in enumerate(counts):
        rank = number % peers.size
        pieces.append(of_ranks[rank, :, ends[rank] : ends[rank] + count])
        ends[rank] += count
    return torch.cat(pieces, dim=1)


_NO_ROWS = np.empty(0, dtype=np.int64)

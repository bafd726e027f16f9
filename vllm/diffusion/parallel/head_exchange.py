# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism by an exchange of heads (Ulysses, Jacobs et al. 2023).

Every stage except attention processes rows independently, so each rank has a part of the rows.
Attention needs all rows of a sequence, but processes heads independently. So before attention,
each rank sends its rows of the other heads and receives the others' rows of its heads. After
attention, the results are sent back. Heads are never divided, so every number is computed as on
one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.core.stages import exchanged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.parallel.groups import RankGroup


class HeadExchange:
    """Exchanges rows with all heads for all rows with some heads, and back.

    Letters: R rows of all ranks, r rows of this rank, h heads, N ranks, hd head width.

    Args:
        peers: the ranks, each of which has consecutive heads.
        counts: number of rows of every rank; the rows of all ranks follow one another by rank.
    """

    def __init__(self, peers: RankGroup, counts: Sequence[int]) -> None:
        self._peers, self.counts = peers, list(counts)
        self._own = [self.counts[peers.rank]] * peers.size

    def to_heads(self, x: Tensor, buffers: Buffers) -> Tensor:
        """Return all ranks' rows of this rank's heads.

        Args:
            x: [r, h, hd], contiguous; h is a multiple of N.
            buffers: memory for the result [R, h / N, hd], and scratch memory.
        """
        (rows, heads, width), size = x.shape, self._peers.size
        part = heads // size
        given_rows, all_rows = exchanged(x.dtype, part, width)
        out = all_rows.take(buffers, sum(self.counts))
        with buffers.scope("exchange"):
            given = given_rows.take(buffers, size * rows)
            given.view(size, rows, part, width).copy_(
                x.view(rows, size, part, width).transpose(0, 1)
            )
            self._peers.exchange(out, given, self.counts, self._own)
        return out

    def to_rows(self, x: Tensor, out: Tensor, buffers: Buffers) -> Tensor:
        """Return all heads of this rank's rows.

        Args:
            x: [R, h / N, hd], contiguous.
            out: [r, h, hd], contiguous, written and returned.
            buffers: scratch memory.
        """
        size, (_, part, width), rows = self._peers.size, x.shape, out.shape[0]
        with buffers.scope("exchange"):
            given_rows, _ = exchanged(x.dtype, part, width)
            returned = given_rows.take(buffers, size * rows)
            self._peers.exchange(returned, x, self._own, self.counts)
            by_rank = returned.view(size, rows, part, width)
            out.view(rows, size, part, width).copy_(by_rank.transpose(0, 1))
        return out


def as_bytes(x: Tensor) -> Tensor:
    """View one-byte numbers as bytes, because not all collectives support their dtype."""
    return x.view(torch.uint8) if x.itemsize == 1 else x

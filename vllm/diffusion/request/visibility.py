# SPDX-License-Identifier: Apache-2.0
"""Visibility in a family's attention: which keys a query reads, and which keys are final.

A forward pass computes a window of a sequence. It may also read keys that earlier passes stored.
All numbers are positions of one sequence; nothing here depends on rows, buffers or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple


class Forward(NamedTuple):
    """Positions of one sequence that a forward pass computes and reads.

    Attributes:
        window: positions that it computes, consecutive.
        kept: number of positions, from 0, whose keys and values earlier passes have stored; there
            is no gap between the last of them and the window.
        committed: number of positions, from 0, whose tokens never change again.
        is_causal: in families with causal context: whether positions attend only to earlier
            positions, as no block is being denoised.
    """

    window: range
    kept: int = 0
    committed: int = 0
    is_causal: bool = False

    @property
    def num_keys(self) -> int:
        """Number of positions, from 0, that have keys in this forward pass."""
        return max(self.kept, self.window.stop)


class WindowPart(NamedTuple):
    """Consecutive positions `first` to `stop` - 1 of a window that have the same visibility.

    Attributes:
        num_keys, block_length: keys that are read, see `Visibility.seen_by`.
        reads_kept: whether some keys that are read are not computed by the forward pass.
        block_start: as in `core.spans.Span`; -1 if layers compute all rows in the same way.
    """

    first: int
    stop: int
    num_keys: int
    block_length: int
    reads_kept: bool
    block_start: int = -1


@dataclass(frozen=True)
class Visibility:
    """Visibility of full attention: every position attends to every other one.

    Each key depends on all tokens, so it is final only when all tokens are. Keys that are kept
    while tokens change are an approximation.

    Attributes:
        block_length: number of positions of a block if a position attends only to its block and the
            blocks before; 0 if it attends to all positions.
    """

    block_length: int = 0
    is_whole: bool = False

    def with_blocks_of(self, block_length: int, offset: int = 0) -> Visibility:
        """Return this visibility with blocks of `block_length` positions.

        `offset` is that of `BlockCausal`.
        """
        return self

    def in_whole_blocks(self, length: int) -> int:
        """Round a number of positions up to whole blocks."""
        return length

    @property
    def kept_unit(self) -> int:
        """Number of positions in a unit whose keys depend on each other; 0 if all do."""
        return self.block_length

    def next_final(self, num_kept: int) -> int:
        """Return how many positions must be committed until more than `num_kept` are final."""
        return num_kept + self.kept_unit

    def cut(self, start: int, room: int) -> int:
        """Return the end of a forward pass from position `start` that is cut to `room` rows."""
        return start + room - room % self.block_length

    def parts(self, forward: Forward) -> tuple[WindowPart, ...]:
        """Split the window into parts with the same visibility, usually one part."""
        return (self.part(forward, forward.window),)

    def part(self, forward: Forward, positions: range) -> WindowPart:
        """Return a part of a forward pass's window with this visibility."""
        num_keys = forward.num_keys
        seen = self.seen_by(positions, num_keys)
        return WindowPart(positions.start, positions.stop, *seen, num_keys > len(forward.window))

    def first_end(self, prompt_length: int) -> int:
        """Return the end of a request's first forward pass, if the sequence is long enough."""
        return self.in_whole_blocks(prompt_length + 1)

    def num_seen(self, query: int, num_keys: int) -> int:
        """Return the number of keys, among positions 0 to `num_keys` - 1, that a query reads.

        These are the first positions. `query` is the position of the query.
        """
        return num_keys

    def seen_by(self, window: range, num_keys: int) -> tuple[int, int]:
        """Return the number of keys that a window reads, and 0 if all its queries read all keys.

        Otherwise the second number is the block length. `num_keys` is that of `num_seen`.
        """
        num_seen = self.num_seen(window.start, num_keys)
        # All queries are in one block.
        if window.stop <= num_seen:
            return num_seen, 0
        return num_keys, self.block_length

    def final(self, forward: Forward) -> range:
        """Return the positions of the window whose keys and values never change again.

        Keys from before the window are assumed to be final.
        """
        sees_all_final = forward.committed >= forward.num_keys and forward.window.start == 0
        return forward.window if sees_all_final else range(0)


@dataclass(frozen=True)
class BlockCausal(Visibility):
    """Visibility in which a position attends to its own block and all blocks before it.

    Blocks lie on a grid; the last one may be cut. A key depends on the tokens of its block and of
    earlier blocks, so keys of committed blocks are final and can be kept exactly.

    Attributes:
        offset: number of positions that the first block lacks, less than a block.
        is_whole: whether masks also complete the last block of a prompt without an answer, because
            rows of a block depend on each other outside attention.
    """

    block_length: int = 32
    is_whole: bool = False
    offset: int = 0

    def with_blocks_of(self, block_length: int, offset: int = 0) -> Visibility:
        return replace(self, block_length=block_length, offset=offset)

    def in_whole_blocks(self, length: int) -> int:
        return self._last_end(length + self.block_length - 1)

    def next_final(self, num_kept: int) -> int:
        return self._last_end(num_kept + self.block_length)

    def cut(self, start: int, room: int) -> int:
        return self._last_end(start + room)

    def parts(self, forward: Forward) -> tuple[WindowPart, ...]:
        # Attention counts blocks from position 0. On another grid, every block is a part.
        if not self.offset:
            return super().parts(forward)
        start, stop = forward.window.start, forward.window.stop
        ends = range(self.next_final(start), stop, self.block_length)
        bounds = pairwise((start, *ends, stop))
        return tuple([self.part(forward, range(*block)) for block in bounds])

    def num_seen(self, query: int, num_keys: int) -> int:
        return min(self.next_final(query), num_keys)

    def final(self, forward: Forward) -> range:
        start, whole_blocks = forward.window.start, self._last_end(forward.committed)
        return range(start, max(start, min(forward.window.stop, whole_blocks)))

    def _last_end(self, position: int) -> int:
        """Return the end of the last block that ends at `position` or before."""
        return (position + self.offset) // self.block_length * self.block_length - self.offset


FULL = Visibility()


def num_positions(visibility: Visibility, prompt_length: int, gen_length: int) -> int:
    """Return the number of positions in a request's row of tokens.

    Without an answer, these are the positions of the prompt alone.
    """
    length = prompt_length + gen_length
    is_whole = gen_length or visibility.is_whole
    return visibility.in_whole_blocks(length) if is_whole else length

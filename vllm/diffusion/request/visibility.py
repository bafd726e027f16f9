# SPDX-License-Identifier: Apache-2.0
"""Visibility in a family's attention: which keys a query reads, and which keys are final.

A forward computes a window of a sequence. It may also read keys that earlier forwards stored.
Everything is counted in positions of one sequence; nothing here depends on rows, buffers or
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class Forward(NamedTuple):
    """Positions of one sequence that a forward computes and reads.

    Attributes:
        window: positions that it computes, consecutive.
        kept: positions, from 0, whose keys and values earlier forwards have stored; no position
            between the last of them and the window is missing.
        committed: positions from 0 whose tokens never change again.
        is_causal: in families whose context is causal: positions see those before them alone, and
            none of a block that is denoised.
    """

    window: range
    kept: int = 0
    committed: int = 0
    is_causal: bool = False

    @property
    def num_keys(self) -> int:
        """Number of positions, from 0, that have keys in this forward."""
        return max(self.kept, self.window.stop)


class WindowPart(NamedTuple):
    """Consecutive positions of a window, `first` to `stop` - 1, that see by one visibility.

    Attributes:
        num_keys, block_length: keys that are read, see `Visibility.seen_by`.
        reads_kept: some keys of the window are not computed by the forward.
    """

    first: int
    stop: int
    num_keys: int
    block_length: int
    reads_kept: bool


@dataclass(frozen=True)
class Visibility:
    """Visibility of full attention: every position attends to every other one.

    A key then depends on all tokens, so it is final only when they all are: keys that are kept
    while tokens change are an approximation.

    Attributes:
        block_length: positions of a block, where a position attends to its block and those before;
            0 where it attends to all.
    """

    block_length: int = 0
    is_whole: bool = False

    def with_blocks_of(self, block_length: int) -> Visibility:
        """Return this visibility with blocks of `block_length` positions."""
        return self

    def in_whole_blocks(self, length: int) -> int:
        """Round a number of positions up to whole blocks."""
        return length

    @property
    def kept_unit(self) -> int:
        """Positions whose keys depend on each other; 0 where all do."""
        return self.block_length

    def parts(self, forward: Forward) -> tuple[WindowPart, ...]:
        """Split the window of a forward by what its positions see; most often it is one part."""
        return (self.part(forward, forward.window),)

    def part(self, forward: Forward, positions: range) -> WindowPart:
        """Return a part of a forward's window whose positions see by this visibility."""
        num_keys = forward.num_keys
        seen = self.seen_by(positions, num_keys)
        return WindowPart(positions.start, positions.stop, *seen, num_keys > len(forward.window))

    def first_end(self, prompt_length: int) -> int:
        """Return the end of a request's first forward, if the sequence reaches as far."""
        return self.in_whole_blocks(prompt_length + 1)

    def num_seen(self, query: int, num_keys: int) -> int:
        """Number of keys, of those at positions 0 to `num_keys` - 1, that a query reads.

        These are the first ones; `query` is its position.
        """
        return num_keys

    def seen_by(self, window: range, num_keys: int) -> tuple[int, int]:
        """Return the number of keys that a window reads, and 0 if all its queries read them.

        Otherwise the second number is the block length. Arguments are those of `num_seen`.
        """
        num_seen = self.num_seen(window.start, num_keys)
        if window.stop <= num_seen:  # all are in one block
            return num_seen, 0
        return num_keys, self.block_length

    def final(self, forward: Forward) -> range:
        """Return the positions of the window whose keys and values no later forward would change.

        Keys kept from before the window are taken to be final.
        """
        sees_all_final = forward.committed >= forward.num_keys and forward.window.start == 0
        return forward.window if sees_all_final else range(0)


@dataclass(frozen=True)
class BlockCausal(Visibility):
    """Visibility in which a position attends to its own block and all blocks before it.

    Blocks lie on a grid from position 0; the last one may be cut. A key depends on the tokens of
    its block and of those before, so the keys of committed blocks are final, and exact to keep.

    Attributes:
        is_whole: whether masks complete the last block of a prompt without an answer, too, as rows
            of a block depend on each other beyond attention.
    """

    block_length: int = 32
    is_whole: bool = False

    def with_blocks_of(self, block_length: int) -> Visibility:
        return replace(self, block_length=block_length)

    def in_whole_blocks(self, length: int) -> int:
        return -(-length // self.block_length) * self.block_length

    def num_seen(self, query: int, num_keys: int) -> int:
        return min((query // self.block_length + 1) * self.block_length, num_keys)

    def final(self, forward: Forward) -> range:
        start = forward.window.start
        whole_blocks = forward.committed // self.block_length * self.block_length
        return range(start, max(start, min(forward.window.stop, whole_blocks)))


FULL = Visibility()


def num_positions(visibility: Visibility, prompt_length: int, gen_length: int) -> int:
    """Positions of a request's row of tokens; of the prompt alone where nothing is generated."""
    length = prompt_length + gen_length
    is_whole = gen_length or visibility.is_whole
    return visibility.in_whole_blocks(length) if is_whole else length

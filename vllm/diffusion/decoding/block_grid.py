# SPDX-License-Identifier: Apache-2.0
"""Blocks of block-causal families: a grid, filled from left to right.

With `block_grid` "start", position p is in block p // block_length. With "answer" the prompt ends
with a block, so the first block may be shorter. The answer may end inside the last block, which is
decoded up to the end of the answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Array, Candidates, DecodingRule, ForwardTarget

if TYPE_CHECKING:
    from vllm.diffusion.request.params import DiffusionParams


class BlockProgress(NamedTuple):
    """Progress of the blocks of a sequence.

    Attributes:
        start: start of the first block with masked positions; the end of the sequence if there is
            none.
        masked: [K] int64, ascending: the masked positions of that block.
        num_filled: number of positions, from 0, before the first masked position.
        is_over: whether the answer ends before the first masked position.
    """

    start: int
    masked: Array
    num_filled: int
    is_over: bool


class GridRule(DecodingRule):
    """Decodes the first block with a masked position, in which all masked positions compete.

    A block is delivered when it is filled. The answer ends earlier if it reaches its maximum length
    or a stop token and no earlier position is masked, because no later commit could change it. With
    `complete_blocks` it ends with a block.
    """

    drawn: ClassVar[CandidateScoring] = CandidateScoring(draw="filtered")

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        draw = "gumbel" if params.scores_clean else self.drawn.draw
        self.scoring = replace(self.drawn, draw=draw, scores_all=not params.scores_after_filters)
        # Number of positions that the first block lacks.
        self._offset = params.block_offset(prompt_length)
        self.start = self._first = -1  # start of the active block, and its first masked position
        self._rows = (0, 0)  # rows of the active block
        self.step = 0  # number of forwards of the active block so far
        self._end = prompt_length + params.gen_length  # maximum end of the answer
        # Start of a block; no earlier block has masked positions.
        self._first_block = 0
        self._front: BlockProgress | None = None  # progress since the latest choice

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        start, masked, self._first, is_over = self.front(tokens)
        if is_over:
            return None
        if start != self.start:
            self.start, self.step, self.forbid_mask = start, 0, False
            self._rows = start, self.block_end(start)
        return self.target(masked)

    def target(self, masked: Array) -> ForwardTarget:
        """Return the target of a forward of the active block with masked positions `masked` [K]."""
        return ForwardTarget(masked, self._rows)

    def num_settled(self, tokens: Array) -> int:
        front = self.front(tokens)
        return front.num_filled if front.is_over else front.start

    def select(self, candidates: Candidates) -> Array:
        self._front = None
        return super().select(candidates)

    def next_target(self, tokens: Array, left: Array, has_changes: bool) -> ForwardTarget | None:
        self._front = None
        self.step += 1
        self.forbid_mask = not has_changes
        if not left.size:
            self._first_block = self.block_end(self.start)
            return self.prepare(tokens)
        before, self._first = self._first, int(left[0])
        if self._first > before and self._ends_within(tokens, before, self._first):
            return None
        return self.target(left)

    # A GPU waits while the requests of a step commit, and there may be hundreds of them. So the
    # facts about the tokens that are needed before the next choice are computed once.

    def front(self, tokens: Array) -> BlockProgress:
        """Return the progress of `tokens` [T] since the latest choice."""
        if self._front is None:
            self._front = self._look(tokens)
        return self._front

    def _look(self, tokens: Array) -> BlockProgress:
        masked = self._masked_of_block(tokens)
        # Usually the next block has masked positions.
        if not masked.size:
            self._first_block = self.block_end(self._first_block)
            masked = self._masked_of_block(tokens)
        if not masked.size:
            self._first_block = self._next_block(tokens)
            masked = self._masked_of_block(tokens)
        first = int(masked[0]) if masked.size else self._first_block
        return BlockProgress(self._first_block, masked, first, self._is_over(tokens, first))

    def _masked_of_block(self, tokens: Array) -> Array:
        start = self._first_block
        block = tokens[start : self.block_end(start)]
        masked: Array = (block == self._mask).nonzero()[0]
        masked += start
        return masked

    def _next_block(self, tokens: Array) -> int:
        """Return the start of the next block with masked positions, or the end of the sequence."""
        start = self.block_end(self._first_block)
        masked = tokens[start:] == self._mask
        return self._block_start(start + int(masked.argmax())) if masked.any() else len(tokens)

    def block_end(self, position: int) -> int:
        """Return the end of the block of a position."""
        length = self.params.block_length
        return position + length - (position + self._offset) % length

    def _block_start(self, position: int) -> int:
        return max(self.block_end(position) - self.params.block_length, 0)

    def _is_over(self, tokens: Array, first: int) -> bool:
        """Whether the answer ends before the first masked position."""
        if self.params.complete_blocks and first != self._block_start(first):
            return False
        last_start = self._block_start(max(first - 1, 0))
        return first >= len(tokens) or self._ends_within(tokens, last_start, first)

    def _ends_within(self, tokens: Array, start: int, first: int) -> bool:
        """Whether the answer ends before `first`, given that it did not end before `start`."""
        if self.params.complete_blocks and first != self._block_start(first):
            return False
        if first >= self._end or not self.params.stop_ids:
            return first >= self._end
        begun = tokens[max(start, self.prompt_length) : first].tolist()
        return not self.params.stop_ids.isdisjoint(begun)

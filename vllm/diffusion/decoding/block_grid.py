# SPDX-License-Identifier: Apache-2.0
"""Blocks of block-causal families: an absolute grid, filled from left to right.

Position p lies in block p // block_length. The answer may end inside the last block, which is
decoded as far as the answer reaches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from vllm.diffusion.decoding.base import Array, DecodingRule, Mask, Work
from vllm.diffusion.scoring import Scoring

if TYPE_CHECKING:
    from vllm.diffusion.params import DiffusionParams


class GridRule(DecodingRule):
    """The active block is the first one with a masked position; its masked positions compete.

    A block is given when it is filled. An answer ends earlier where its length or a stop token is
    reached and nothing before is masked: no later commit could change it.
    """

    drawn: ClassVar[Scoring] = Scoring(draw="filtered")

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self.scoring = replace(self.drawn, scores_all=not params.scores_after_filters)
        self.start = -1  # of the active block
        self.step = 0  # forwards of the active block so far
        self._num_filled = 0  # positions from 0 that are known not to be masked

    def prepare(self, tokens: Array) -> Work | None:
        first = self._first_masked(tokens)
        if self._is_over(tokens, first):
            return None
        start = self._block_start(first)
        if start != self.start:
            self.start, self.step, self.forbid_mask = start, 0, False
        block = tokens[start : start + self.params.block_length]
        return self.work(block == self.params.mask_id, start)

    def work(self, masked: Mask, start: int) -> Work:
        """What a forward of the block at `start` is for; which of it is `masked` [block_length]."""
        eligible = masked.nonzero()[0] + start
        return Work(eligible, (start, start + len(masked)))

    def settled(self, tokens: Array) -> int:
        first = self._first_masked(tokens)
        return first if self._is_over(tokens, first) else self._block_start(first)

    def _first_masked(self, tokens: Array) -> int:
        """The first masked position, or the length of the sequence; most often it is near."""
        near = self._num_filled + self.params.block_length
        for end in (near, len(tokens)):
            masked = tokens[self._num_filled : end] == self.params.mask_id
            first = int(masked.argmax()) if len(masked) else 0
            if len(masked) and masked[first]:
                self._num_filled += first
                return self._num_filled
        return len(tokens)

    def _block_start(self, position: int) -> int:
        return position // self.params.block_length * self.params.block_length

    def _is_over(self, tokens: Array, first: int) -> bool:
        """Whether the answer ends before the first masked position."""
        if first >= min(self.prompt_length + self.params.gen_length, len(tokens)):
            return True
        newest = self._block_start(max(first - 1, 0))
        begun = tokens[max(newest, self.prompt_length) : first].tolist()
        return not self.params.stop_ids.isdisjoint(begun)

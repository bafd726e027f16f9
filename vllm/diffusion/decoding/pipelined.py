# SPDX-License-Identifier: Apache-2.0
"""Blocks decoded at the same time: the next block starts before the last one is complete."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Candidates, DecodingRule, ForwardTarget, most_certain_first

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Mask
    from vllm.diffusion.request.params import DiffusionParams


@dataclass
class Block:
    """A block that has started; the prompt counts as the first block, complete and full.

    Attributes:
        start, end: positions of the block, half-open.
        num_masked: number of masked positions.
        is_full: whether the block gets at least one token in every step while it is the first full
            block with masks.
        done_at: number of the first step in which the block was complete, if a cache needs it.
        is_cached: whether its keys and values are cached, or need not be.
    """

    start: int
    end: int
    num_masked: int = 0
    is_full: bool = False
    done_at: int | None = None
    is_cached: bool = False

    @property
    def progress(self) -> float:
        """Share of the block that is decoded."""
        return 1 - self.num_masked / (self.end - self.start)


class PipelinedRule(DecodingRule):
    """Decodes all started blocks at once; their masked positions compete by entropy.

    The next block starts when the last block is decoded to `block_add_threshold`, or complete. A
    block becomes full when the previous block is decoded to `decoded_token_threshold`. If no
    candidate in the first full block with masked positions is accepted, the candidate with its
    lowest entropy is committed.

    `steps`, if given, limits the forwards: the last forward fills all masked positions. If a
    forward changes nothing because the model proposed the mask token, the next forward forbids that
    token.
    """

    scoring = CandidateScoring(score="negative_entropy", epsilon=1e-12)

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self.blocks = [Block(0, prompt_length, is_full=True, done_at=0)]
        self.step = 0  # number of the forward, from 1
        self._length = prompt_length + params.gen_length
        self._first_full: Block | None = None  # first full block with masked positions

    def fork(self) -> Self:
        other = super().fork()
        other.blocks = [replace(block) for block in self.blocks]
        if self._first_full is not None:
            other._first_full = other.blocks[self.blocks.index(self._first_full)]
        return other

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        masked = tokens == self.params.mask_id
        if not masked.any():
            return None
        self.step += 1
        if self.step == self.params.steps:
            return self.fill_remaining(masked)
        target = self.plan(tokens, masked)
        if target.eligible.size == 0 and target.fill is None:
            return self.fill_remaining(masked)  # masks of the prompt that are out of reach
        unfinished = (b for b in self.blocks if b.is_full and b.num_masked > 0)
        self._first_full = next(unfinished, None)
        return target

    def choose(self, candidates: Candidates) -> Array:
        accepted = self.accept(candidates.scores)
        forced = self.index_to_force(candidates, accepted)
        if forced is not None:
            accepted[forced] = True
        elif not accepted.any():
            accepted[most_certain_first(candidates.scores)[0]] = True
        chosen = accepted.nonzero()[0]
        self.forbid_mask_unless_changed(candidates, chosen)
        return chosen

    def index_to_force(self, candidates: Candidates, accepted: Mask) -> int | None:
        """Return the candidate to commit in the first full block if none of its is `accepted`."""
        block, positions = self._first_full, candidates.positions
        if block is None:
            return None
        inside = ((positions >= block.start) & (positions < block.end)).nonzero()[0]
        if inside.size == 0 or accepted[inside].any():
            return None
        return int(inside[most_certain_first(candidates.scores[inside])[0]])

    @property
    def can_start_block(self) -> bool:
        return self.blocks[-1].end < self._length

    @property
    def active_end(self) -> int:
        """End of the last block whose positions may be accepted."""
        return max(b.end for b in self.blocks if b.is_full or b.num_masked > 0)

    def start_block(self) -> Block:
        """Start the next block; its masked positions are not counted yet."""
        start = self.blocks[-1].end
        self.blocks.append(Block(start, min(start + self.params.block_length, self._length)))
        return self.blocks[-1]

    def count_masked(self, masked: Mask) -> None:
        for block in self.blocks[1:]:
            block.num_masked = int(masked[block.start : block.end].sum())

    def promote_blocks(self) -> None:
        for before, block in pairwise(self.blocks):
            if before.progress >= self.params.decoded_token_threshold:
                block.is_full = True

    def start_block_if_due(self, masked: Mask) -> bool:
        """Start the next block if there is one and the last one is decoded far enough."""
        last = self.blocks[-1]
        is_due = last.progress >= self.params.block_add_threshold or last.num_masked == 0
        if not (is_due and self.can_start_block):
            return False
        block = self.start_block()
        block.num_masked = int(masked[block.start : block.end].sum())
        block.is_full = last.progress >= self.params.decoded_token_threshold
        return True

    @abstractmethod
    def plan(self, tokens: Array, masked: Mask) -> ForwardTarget:
        """Update the blocks and return the target of the forward; `masked` is [T] bool."""

    @abstractmethod
    def accept(self, scores: Array) -> Mask:
        """Return the candidates that are certain enough, [R] bool; scores are -entropies."""

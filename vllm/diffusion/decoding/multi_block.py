# SPDX-License-Identifier: Apache-2.0
"""Several blocks at once, as in d3LLM's `generate_multi_block` (arXiv:2601.07568).

The reference differs between LLaDA and Dream; families with shifted logits follow Dream.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import numpy as np

from vllm.diffusion.decoding.base import Candidates, ForwardTarget
from vllm.diffusion.decoding.pipelined import PipelinedRule
from vllm.diffusion.decoding.until_filled import with_best

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.decoding.base import Array, Mask
    from vllm.diffusion.decoding.pipelined import Block
    from vllm.diffusion.request.params import DiffusionParams


class DelayedCache:
    """Caches the keys and values of blocks that have been complete for some steps.

    The cached positions are a prefix of the sequence, which grows with time.

    A block is cached by the forward that comes `cache_delay_iter` steps after its completion was
    observed. Until then its tokens are new to the other blocks, so whole sequences are computed.
    Every `refresh_interval`-th step also computes the whole sequence.

    The published cache can hold rows twice if blocks become complete together; this cache always
    holds the rows before `num_kept`.

    Attributes:
        num_kept: number of positions whose keys and values are computed again only in a refresh.
    """

    def __init__(self, params: DiffusionParams) -> None:
        self._delay = params.cache_delay_iter
        self._refresh_interval = params.refresh_interval
        self._looks_past_waiting = params.logit_shift > 0  # like the reference for Dream
        self.num_kept = 0

    def first_row(self, blocks: Sequence[Block], step: int) -> int:
        """Return the first position of forward `step` (from 1), which ends with the sequence."""
        kept_before = self.num_kept
        grown_old = self._grown_old(blocks, step)
        if grown_old:
            # The rows of these blocks are computed one last time.
            self.num_kept = grown_old[-1].end
            return kept_before
        is_settling = any(
            b.num_masked == 0 and b.done_at is not None and not b.is_cached for b in blocks
        )
        return 0 if is_settling or step % self._refresh_interval == 0 else kept_before

    def _grown_old(self, blocks: Sequence[Block], step: int) -> list[Block]:
        """Return the blocks to cache from now on, and record when blocks became complete."""
        old_blocks = []
        for block in blocks:
            if block.end <= self.num_kept:
                continue
            if block.num_masked > 0:
                break
            if block.done_at is None:
                block.done_at = step
            if step - block.done_at < self._delay:
                if not self._looks_past_waiting:
                    break
            elif not block.is_cached:
                block.is_cached = True
                old_blocks.append(block)
        return old_blocks


class MultiBlock(PipelinedRule):
    """Commits every candidate whose entropy is up to the threshold, and always the lowest one.

    The token that a full block is forced to take is the argmax of the noise-free logits. On Dream
    three details differ: entropies must be below the threshold, the lowest entropy is not always
    committed, and a forced token is drawn like every other token.

    With `early_stop`, everything after the first end-of-sequence token is filled with that token
    before every forward. Positions there that were masked until then still compete in that forward.
    If one of them is accepted, the next forward fills it again.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self._is_dream = params.logit_shift > 0
        if not self._is_dream:
            self.scoring = replace(self.scoring, greedy=True)
        self._forced: int | None = None
        self._cache = DelayedCache(params) if params.cache == "delayed" else None
        self.start_block().is_full = params.decoded_token_threshold <= 1

    def fork(self) -> Self:
        other = super().fork()
        other._cache = copy.copy(self._cache)
        return other

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        self._forced = None
        return super().prepare(tokens)

    def plan(self, tokens: Array, masked: Mask) -> ForwardTarget:
        competing, length = masked, len(masked)
        eos, fill = self._first_eos(tokens), None
        if eos is not None:
            fill = self._fill_after(eos, tokens)
            masked = masked.copy()
            masked[eos + 1 :] = False
            if not masked.any():
                return ForwardTarget(np.empty(0, dtype=np.int64), (0, length), fill)
        self.count_masked(masked)
        if eos is not None:
            self._complete_blocks_after(eos)
        self.promote_blocks()
        if eos is None:
            self.start_block_if_due(masked)
            # The first blocks of a given text may have no masks.
            while not masked[: self.active_end].any() and self.start_block_if_due(masked):
                pass
        first_row = 0 if self._cache is None else self._cache.first_row(self.blocks, self.step)
        if not masked[first_row:].any():  # only positions of the prompt are still masked
            first_row = 0
        eligible = competing[: self.active_end].nonzero()[0]
        return ForwardTarget(eligible[eligible >= first_row], (first_row, length), fill)

    def _first_eos(self, tokens: Array) -> int | None:
        """Return the position of the end-of-sequence token after which everything is filled."""
        if not self.params.early_stop or self.params.eos_id is None:
            return None
        positions = (tokens[self.prompt_length :] == self.params.eos_id).nonzero()[0]
        return self.prompt_length + int(positions[0]) if positions.size else None

    def _fill_after(self, eos: int, tokens: Array) -> tuple[int, int] | None:
        token = int(tokens[eos])
        return (eos + 1, token) if (tokens[eos + 1 :] != token).any() else None

    def _complete_blocks_after(self, eos: int) -> None:
        """Mark blocks that start after `eos` as full; also the block with `eos`, if complete."""
        while self.can_start_block:
            self.start_block().is_cached = self._cache is not None
        for block in self.blocks:
            if block.start > eos or (block.end > eos and block.num_masked == 0):
                block.is_full = True

    def accept(self, scores: Array) -> Mask:
        if self._is_dream:
            return -scores < self.params.threshold
        return with_best(-scores <= self.params.threshold, scores)

    def index_to_force(self, candidates: Candidates, accepted: Mask) -> int | None:
        self._forced = super().index_to_force(candidates, accepted)
        return self._forced

    def replacement(self, candidates: Candidates) -> Array:
        if self._is_dream or self._forced is None or candidates.greedy is None:
            return candidates.tokens
        tokens = candidates.tokens.copy()
        tokens[self._forced] = candidates.greedy[self._forced]
        return tokens

# SPDX-License-Identifier: Apache-2.0
"""Rules of families with causal context (Nemotron-Labs-Diffusion).

A causal forward of the tokens so far predicts the next token, the seed. A block begins with the
seed, right after the tokens so far, and is denoised with their keys and values. In the forward of a
block, rows attend to each other and a row predicts its own token.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Array, Candidates, ForwardTarget, ScorePick
from vllm.diffusion.decoding.block_quota import ConfidenceOrQuota, Quota

if TYPE_CHECKING:
    from vllm.diffusion.request.params import DiffusionParams


class ThinkingBudget:
    """The position at which a request's thinking is ended, unless the model ends it earlier."""

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        self.begin_id, self.end_id = params.think_ids or (-1, -1)
        self._start = prompt_length
        budget = params.thinking_token_budget
        self._position = math.inf if budget is None else prompt_length + budget

    def ends_at(self, tokens: Array, start: int, stop: int) -> int | None:
        """Return the position, in [start, stop), of the token that ends thinking, or None.

        Only `tokens` [T] before `start` are searched for an earlier end.
        """
        if self._position >= stop or self._has_ended(tokens[:start]):
            return None
        return max(int(self._position), start)

    def _has_ended(self, tokens: Array) -> bool:
        ends = (tokens == self.end_id).nonzero()[0]
        if not ends.size or ends[-1] >= self._start:
            return bool(ends.size)
        begins = (tokens[: self._start] == self.begin_id).nonzero()[0]
        return bool(begins.size) and bool(begins[-1] < ends[-1])


class SeededQuota(Quota):
    """Commits the quota of the step: a share of the masks after the seed.

    Blocks begin with seeds, on a grid that starts at the end of the prompt. A seed is never the
    mask token. There is no seed after the last block.
    """

    drawn = CandidateScoring()

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self._first_block = prompt_length
        self._offset = -prompt_length % params.block_length
        self._budget = ThinkingBudget(params, prompt_length)
        # Position of the end of thinking in the block whose seed comes next.
        self._think_end: int | None = None
        self._is_seed = False  # whether the forward is for a seed

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        target = super().prepare(tokens)
        if target is None:
            return None
        if self._is_seed:
            self._think_end = self._budget.ends_at(tokens, *self._rows)
            return target
        end, self._think_end = self._think_end, None
        if end is None or self._budget.end_id in tokens[[self.start, end]]:
            return target
        # Thinking ends before the block is denoised. If this fills the block, the next seed
        # follows.

        filled = tokens.copy()
        filled[end] = self._budget.end_id
        self._front = None
        following = super().prepare(filled)
        # The answer ends with this token, after one forward.
        if following is None:
            following = target._replace(eligible=target.eligible[target.eligible != end])
        return following._replace(fill=(end, self._budget.end_id), fill_end=end + 1)

    def target(self, masked: Array) -> ForwardTarget:
        was_seed, start = self._is_seed, self.start
        self._is_seed = int(masked[0]) == start
        if self._is_seed:
            self.forbid_mask = True
            return ForwardTarget(masked[:1], (self._before(start), start), is_causal=True)
        if was_seed:
            self.forbid_mask = False
        return super().target(masked)

    def _before(self, start: int) -> int:
        """Return the first position whose keys and values are stored with the next seed."""
        is_first = start == self.prompt_length
        return 0 if is_first else start - self.params.block_length

    @property
    def pick(self) -> ScorePick | None:
        if not self._is_seed:
            return super().pick
        return None if self._think_end == self.start else ScorePick(1)

    def next_target(self, tokens: Array, left: Array, has_changes: bool) -> ForwardTarget | None:
        if self._is_seed:
            self._front = None
            target = self.prepare(tokens) if self._think_end is None else None
        else:
            target = super().next_target(tokens, left, has_changes)
        # Returning None delivers the previous block.
        return None if self._is_seed else target

    def choose(self, candidates: Candidates) -> Array:
        return np.arange(1) if self._is_seed else super().choose(candidates)

    def replacement(self, candidates: Candidates) -> Array:
        if self._is_seed and self._think_end == self.start:
            return np.array([self._budget.end_id])
        return super().replacement(candidates)


class SeededConfidence(SeededQuota, ConfidenceOrQuota):
    """Commits all candidates that reach the threshold, and always the best one."""

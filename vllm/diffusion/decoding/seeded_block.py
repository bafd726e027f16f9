# SPDX-License-Identifier: Apache-2.0
"""Rules of families whose context is causal (Nemotron-Labs-Diffusion).

A causal forward of the tokens so far predicts the next one, the seed. A block begins with it, lies
right behind the tokens so far, and is denoised over their keys and values; where its rows see each
other, a row predicts its own token.
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
    """Place where a request's thinking is ended, unless the model has ended it before.

    Args:
        params: the request's parameters.
        prompt_length: tokens before the canvas.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        self.begin_id, self.end_id = params.think_ids or (-1, -1)
        self._start = prompt_length
        budget = params.thinking_token_budget
        self._position = math.inf if budget is None else prompt_length + budget

    def ends_at(self, tokens: Array, start: int, stop: int) -> int | None:
        """Return the position, of `start` to `stop` - 1, of the token that ends it; None for none.

        `tokens` [T] are looked at up to `start`.
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
    """Commit the quota of the step: a share of the masks that a seed leaves.

    Blocks begin with seeds, on a grid from the end of the prompt. A seed is never the mask token.
    Behind the last block there is none.
    """

    drawn = CandidateScoring()

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self._first_block = prompt_length
        self._budget = ThinkingBudget(params, prompt_length)
        self._think_end: int | None = None  # its position in the block whose seed is awaited
        self._is_seed = False  # the forward is for a seed

    def _block_start(self, position: int) -> int:
        return position - (position - self.prompt_length) % self.params.block_length

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
        # It ends before the block is denoised. Where that fills the block, the next seed follows.
        filled = tokens.copy()
        filled[end] = self._budget.end_id
        self._front = None
        following = super().prepare(filled)
        if following is None:  # the answer ends with it, after a forward
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
        """Return where the tokens begin whose keys and values are stored with the next seed."""
        is_first = start == self.prompt_length
        return 0 if is_first else start - self.params.block_length

    @property
    def pick(self) -> ScorePick | None:
        if not self._is_seed:
            return super().pick
        return None if self._think_end == self.start else ScorePick(1)

    def go_on(self, tokens: Array, left: Array, has_changes: bool) -> ForwardTarget | None:
        if self._is_seed:
            self._front = None
            target = self.prepare(tokens) if self._think_end is None else None
        else:
            target = super().go_on(tokens, left, has_changes)
        return None if self._is_seed else target  # so that the block before it is delivered

    def choose(self, candidates: Candidates) -> Array:
        return np.arange(1) if self._is_seed else super().choose(candidates)

    def replacement(self, candidates: Candidates) -> Array:
        if self._is_seed and self._think_end == self.start:
            return np.array([self._budget.end_id])
        return super().replacement(candidates)


class SeededConfidence(SeededQuota, ConfidenceOrQuota):
    """Commit all that reaches the threshold, and always the best."""

# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.1: fills masks and replaces committed tokens in one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Candidates, ForwardTarget, most_certain_first
from vllm.diffusion.decoding.block_grid import GridRule

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Mask
    from vllm.diffusion.request.params import DiffusionParams


class JointThreshold(GridRule):
    """Fills the masks that exceed the threshold, and replaces tokens that the model now doubts.

    A block ends with a forward that finds no masks and replaces nothing, or when `max_post_steps`
    forwards have followed the one that filled its last mask. Until then any of its tokens outside
    the prompt may change, so they are settled only at the end.

    The mask token may be proposed, and may replace a token. It is forbidden after a forward that
    therefore changes nothing, and in a block that has taken more forwards than it would need if
    each filled at least one mask.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        if params.temperature == 0:
            # Argmax of the logits, not of their probabilities.
            self.scoring = CandidateScoring()
        self.adjusts_logits = params.penalty_lambda > 0
        self._before = np.empty(0, dtype=np.int64)  # [B], the block before the forward
        self._is_active = False  # whether the block at `start` has begun and not ended
        self._has_decided = False  # whether the result of a forward has not been examined yet
        self._num_post_steps = 0
        self._most_forwards = (params.block_length + 1) * (params.max_post_steps + 1)

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        start = self.num_settled(tokens)
        if start >= min(self.prompt_length + self.params.gen_length, len(tokens)):
            return None
        if not self._is_active:
            self._is_active, self.start, self.step = True, start, 0
            self.forbid_mask, self._num_post_steps = False, 0
        end = self.block_end(start)
        self._before = tokens[start:end].copy()
        positions = np.arange(start, end)
        may_change = (self._before == self.params.mask_id) | (positions >= self.prompt_length)
        return ForwardTarget(positions[may_change], (start, end))

    def num_settled(self, tokens: Array) -> int:
        if self._has_decided:
            self._has_decided = False
            self._is_active = not self._ends_with(tokens[self.start :][: len(self._before)])
        if self._is_active:
            return self.start
        return self.front(tokens).start

    def _ends_with(self, block: Array) -> bool:
        """Whether the forward that produced `block` [B] was the last one of the block."""
        mask_id = self.params.mask_id
        if (block == mask_id).any():
            return False
        is_of_prompt = self.start + len(block) <= self.prompt_length
        if is_of_prompt or np.array_equal(block, self._before):
            return True
        self._num_post_steps += 1
        return self._num_post_steps > self.params.max_post_steps

    def choose(self, candidates: Candidates) -> Array:
        self.step += 1
        self._has_decided = True
        current = self._before[candidates.positions - self.start]
        is_masked = current == self.params.mask_id
        changes = (candidates.tokens != current) & ~is_masked
        edited = changes & (candidates.scores > self.params.editing_threshold)
        chosen: Array = (self._filled(candidates.scores, is_masked) | edited).nonzero()[0]
        is_stuck = not (candidates.tokens != current)[chosen].any()
        self.forbid_mask = is_stuck or self.step >= self._most_forwards
        return chosen

    def _filled(self, scores: Array, is_masked: Mask) -> Mask:
        """Return the masked positions that are filled, [R] bool."""
        filled = is_masked & (scores > self.params.threshold)
        if np.count_nonzero(filled) >= self.params.num_to_transfer:
            return filled
        masked = is_masked.nonzero()[0]
        best = masked[most_certain_first(scores[masked])[: self.params.num_to_transfer]]
        filled[best] = True
        return filled

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Reduce the logit of the token that comes right before a position in the block."""
        offsets = positions + (self.prompt_length - self.start)
        before = torch.from_numpy(self._before).to(logits.device)[(offsets - 1).clamp(min=0)]
        penalties = (offsets > 0).to(logits.dtype) * -self.params.penalty_lambda
        return logits.scatter_add_(1, before[:, None], penalties[:, None])

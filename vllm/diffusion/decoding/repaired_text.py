# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.1 on a canvas that begins with a text: finds the blocks to change, and repairs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding.base import Candidates, ForwardTarget
from vllm.diffusion.decoding.joint_threshold import JointThreshold

if TYPE_CHECKING:
    import torch

    from vllm.diffusion.decoding.base import Array
    from vllm.diffusion.request.params import DiffusionParams


class RepairedText(JointThreshold):
    """Scans the blocks of a text in one forward, and works only on blocks that change.

    A scan computes all blocks that are not settled. A block changes if it has a mask, or a token
    that `JointThreshold` would replace. The blocks before the first block that changes are settled.
    Each block attends to itself and to the blocks before it, so the scan is also the first forward
    of this block. `JointThreshold` then decodes the block until it ends, and the next scan begins
    after it.

    Pinned tokens, and the end tokens after the longest answer, are never replaced. Masks of the
    text are always filled.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        if params.revision is None:
            raise ValueError("revision: wanted a text, got None")
        self._end = prompt_length + params.max_tokens
        of_prompt = np.ones(prompt_length, dtype=np.bool_)
        self._is_fixed = np.append(of_prompt, params.revision.is_pinned(params.max_tokens))
        masks = np.array(params.revision.token_ids) == params.mask_id
        self._is_fixed[prompt_length : prompt_length + masks.size] &= ~masks
        self._is_scanning = False
        # No block before `_scan_start` changes again. A scan ends at `_scan_end`.
        self._scan_start = self._scan_end = self._block_start(prompt_length)
        self._eligible = np.empty(0, dtype=np.int64)

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        if self.num_settled(tokens) >= min(self._end, len(tokens)):
            return None
        if self._is_active:
            target = super().prepare(tokens)
            return target and target._replace(eligible=self._changeable(target.eligible))
        self._is_scanning, self.forbid_mask = True, False
        self.start, self._scan_end = self._scan_start, len(tokens)
        self._before = tokens[self.start :].copy()
        self._eligible = self._changeable(np.arange(self.start, self._end))
        return ForwardTarget(self._eligible, (self.start, self._scan_end))

    def _changeable(self, positions: Array) -> Array:
        """Return the positions that may change, of ascending `positions`."""
        own = positions[positions < self._end]
        changeable: Array = own[~self._is_fixed[own]]
        return changeable

    def cut_scan(self, stop: int) -> ForwardTarget | None:
        """Return the target of a scan that only reaches position `stop`, the end of a block.

        Returns None if no scan has begun or it would reach no block.
        """
        if not self._is_scanning or stop <= self.start:
            return None
        self._scan_end = stop
        eligible = self._eligible[self._eligible < stop]
        return ForwardTarget(eligible, (self.start, stop))

    def num_settled(self, tokens: Array) -> int:
        if self._has_decided:
            self._has_decided = False
            end = self.start + len(self._before)
            self._is_active = not self._ends_with(tokens[self.start : end])
            if not self._is_active:
                self._scan_start = end
        return self.start if self._is_active else self._scan_start

    def select(self, candidates: Candidates) -> Array:
        if not self._is_scanning:
            return super().select(candidates)
        self._is_scanning = False
        first = self._first_change(candidates)
        if first is None:
            self._scan_start = self._scan_end
            return np.empty(0, dtype=np.int64)
        # The block goes on as if this forward had been its own.
        start = self._block_start(first)
        end = self.block_end(start)
        self._before = self._before[start - self.start : end - self.start]
        self._is_active, self.start, self.step, self._num_post_steps = True, start, 0, 0
        inside = (candidates.positions >= start) & (candidates.positions < end)
        chosen = super().select(Candidates(*(x[inside] for x in candidates[:3])))
        selected: Array = inside.nonzero()[0][chosen]
        return selected

    def _first_change(self, candidates: Candidates) -> int | None:
        """Return the first position that a scan would change; None if it would change none."""
        current = self._before[candidates.positions - self.start]
        is_masked = current == self.params.mask_id
        is_doubted = candidates.scores > self.params.editing_threshold
        changes = is_masked | ((candidates.tokens != current) & is_doubted)
        return int(candidates.positions[changes.argmax()]) if changes.any() else None

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Reduce the logit of the token right before a position, as in the blocks themselves."""
        if not self._is_scanning:
            return super().adjust_logits(logits, positions)
        places = positions + (self.prompt_length + self._offset)
        is_first = places % self.params.block_length == 0
        adjusted = super().adjust_logits(logits.clone(), positions)
        return adjusted.where(~is_first[:, None], logits)

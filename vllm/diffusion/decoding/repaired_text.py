# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.1 on a canvas that begins with a text: replaces wrong tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding.joint_threshold import JointThreshold
from vllm.diffusion.decoding.text_scan import TextScan

if TYPE_CHECKING:
    import torch

    from vllm.diffusion.decoding.base import Array, Candidates, Mask


class RepairedText(TextScan, JointThreshold):
    """Repairs the blocks of a text in which `JointThreshold` would replace a token."""

    def _would_change(self, candidates: Candidates) -> Mask:
        current = self._tokens[candidates.positions]
        is_doubted = candidates.scores > self.params.editing_threshold
        changes: Mask = (current == self._mask) | ((candidates.tokens != current) & is_doubted)
        return changes

    def _rows_of(self, positions: Array) -> Array:
        changeable: Array = positions[~self._is_fixed[positions]]
        return changeable

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Reduce the logit of the token right before a position, as in the blocks themselves."""
        if not self._is_scanning:
            return super().adjust_logits(logits, positions)
        places = positions + (self.prompt_length + self._offset)
        is_first = places % self.params.block_length == 0
        adjusted = super().adjust_logits(logits.clone(), positions)
        return adjusted.where(~is_first[:, None], logits)

# SPDX-License-Identifier: Apache-2.0
"""Parallel decoding by a confidence threshold (Fast-dLLM, Wu et al., arXiv:2505.22618)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.decoding.base import BlockwiseRule, Candidates, most_certain_first

if TYPE_CHECKING:
    from vllm.diffusion.params import DiffusionParams


class Threshold(BlockwiseRule):
    """Commit every candidate whose confidence reaches the threshold, and always the best one.

    A block goes on until it has no masked position. `steps`, when given, bounds the forwards of
    the whole canvas: a block that must end so that every later block still gets a forward commits
    all that is left. If a forward changes nothing because the model proposed the mask token, the
    next one forbids that token.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self._forwards = 0

    def block_wants_forward(self, masked: torch.Tensor) -> bool:
        return bool(masked.any())

    def select_in_block(self, candidates: Candidates) -> torch.Tensor:
        self._forwards += 1
        if self._must_finish_block():
            accepted = torch.ones_like(candidates.tokens, dtype=torch.bool)
        else:
            accepted = candidates.scores >= self.params.threshold
            accepted[most_certain_first(candidates.scores)[0]] = True
        chosen = accepted.nonzero().flatten()
        self.forbid_mask = not bool((candidates.tokens[chosen] != self.params.mask_id).any())
        return chosen

    def _must_finish_block(self) -> bool:
        if self.params.steps is None:
            return False
        blocks_after = self.params.num_blocks - self.block - 1
        return self.params.steps - self._forwards <= blocks_after

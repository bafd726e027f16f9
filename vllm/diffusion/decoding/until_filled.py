# SPDX-License-Identifier: Apache-2.0
"""Rules that decode a block until none of its positions is masked."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding.base import BlockwiseRule, most_certain_first

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Candidates, Mask
    from vllm.diffusion.request.params import DiffusionParams


class UntilFilledRule(BlockwiseRule):
    """Decodes a block until it has no masked position; subclasses decide which are certain enough.

    `steps`, if given, limits the forwards of the whole canvas: a block commits everything that is
    left when every later block needs one of the remaining forwards. If a forward changes nothing
    because the model proposed the mask token, the next forward forbids that token.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self._forwards = 0

    def block_wants_forward(self, masked: Mask) -> bool:
        return bool(masked.any())

    def choose(self, candidates: Candidates) -> Array:
        self._forwards += 1
        if self._must_finish_block():
            chosen = np.arange(candidates.positions.size)
        else:
            chosen = self.accept(candidates).nonzero()[0]
        self.forbid_mask_unless_changed(candidates, chosen)
        return chosen

    def _must_finish_block(self) -> bool:
        if self.params.steps is None:
            return False
        blocks_after = self.params.num_blocks - self.block - 1
        return self.params.steps - self._forwards <= blocks_after

    @abstractmethod
    def accept(self, candidates: Candidates) -> Mask:
        """Return the candidates to commit, [R] bool.

        Candidates ascend by position. Without a cache, masked positions of the prompt come first.
        """


def with_best(accepted: Mask, scores: Array) -> Mask:
    """Return `accepted` [R] bool with the most certain candidate added."""
    accepted = accepted.copy()
    accepted[most_certain_first(scores)[0]] = True
    return accepted

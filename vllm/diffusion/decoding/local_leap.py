# SPDX-License-Identifier: Apache-2.0
"""LocalLeap (arXiv:2510.07081): a lower threshold near positions that are certain."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding.base import Candidates, ForwardTarget
from vllm.diffusion.decoding.until_filled import UntilFilledRule, with_best

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Mask
    from vllm.diffusion.request.params import DiffusionParams


class LocalLeap(UntilFilledRule):
    """Commits candidates that reach the threshold, or, near such a candidate, a relaxed one.

    The most certain candidate is always committed. With `early_stop`, decoding ends with the first
    complete block that holds the end-of-sequence token: everything after it is filled with that
    token.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        # Blocks up to here hold no end-of-sequence token.
        self._searched_end = prompt_length

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        target = super().prepare(tokens)
        if not self.params.early_stop or self.params.eos_id is None or self._is_at_end:
            return target
        complete = tokens[self._searched_end : self.block_start]
        if not (complete == self.params.eos_id).any():
            self._searched_end = self.block_start
            return target
        nothing = np.empty(0, dtype=np.int64)
        return ForwardTarget(nothing, (0, len(tokens)), fill=(self.block_start, self.params.eos_id))

    @property
    def _is_at_end(self) -> bool:
        return self.block == self.params.num_blocks

    def accept(self, candidates: Candidates) -> Mask:
        positions, scores = candidates.positions, candidates.scores
        anchors = positions[scores >= self.params.threshold]
        distances = np.abs(positions[:, None] - anchors)
        is_near = (distances <= self.params.radius).any(axis=1)
        is_sure = scores >= self.params.threshold
        is_nearly_sure = scores >= self.params.relaxed_threshold
        return with_best(np.where(is_near, is_nearly_sure, is_sure), scores)

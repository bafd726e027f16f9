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
    """Commit what reaches the threshold, and what reaches the relaxed one near such an anchor.

    The most certain candidate is committed in any case. With `early_stop`, a block that is
    complete and holds the end-of-sequence token is the last one: everything behind it is filled
    with that token.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self._searched_end = prompt_length  # blocks up to here hold no end-of-sequence token

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

# SPDX-License-Identifier: Apache-2.0
"""Rules of LLaDA2.0 and SDAR (arXiv:2510.06303): steps of a block, with a quota each.

Quotas divide the length of a block among its steps, regardless of the number of its masked
positions: the first block may begin with tokens of the prompt. In families that count masks
(Stable-DiffCoder), quotas divide the positions that are masked when the block begins.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Candidates, ScorePick, most_certain_first
from vllm.diffusion.decoding.block_grid import GridRule
from vllm.diffusion.decoding.semi_ar import transfer_quota

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, ForwardTarget
    from vllm.diffusion.request.params import DiffusionParams


class Quota(GridRule):
    """Commits the quota of the step: the most confident candidates.

    The quota is also spent on a position for which the model proposes the mask token. This position
    stays masked, as in the references. If nothing else was committed, the next forward forbids that
    token. So does the forward that fills the positions left after the last step.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        if params.steps_per_block is None:
            raise ValueError("steps_per_block: must be resolved, got None")
        self._num_steps = params.steps_per_block
        self._num_shared = params.block_length  # sum of the quotas of a block

    def target(self, masked: Array) -> ForwardTarget:
        if self.step == 0 and self.params.counts_masks:
            self._num_shared = masked.size
        self.forbid_mask |= self.step >= self._num_steps
        return super().target(masked)

    @property
    def pick(self) -> ScorePick | None:
        return self.wanted()

    def wanted(self) -> ScorePick:
        """Return the candidates that the forward commits."""
        return ScorePick(self._quota())

    def choose(self, candidates: Candidates) -> Array:
        pick, scores = self.wanted(), candidates.scores
        num_chosen = max(pick.quota, np.count_nonzero(scores > pick.threshold))
        order = np.arange(scores.size) if pick.in_order else most_certain_first(scores)
        chosen = order[:num_chosen]
        self.forbid_mask_unless_changed(candidates, chosen)
        self.step += 1
        return chosen

    def _quota(self) -> int:
        if self.step >= self._num_steps:
            return self.params.block_length
        quota = transfer_quota(self._num_shared, self._num_steps, self.step)
        # A forward without the mask token must make progress.
        return max(quota, int(self.forbid_mask))


class ConfidenceOrQuota(Quota):
    """Commits all candidates above the threshold if they meet the quota, else the best ones.

    In families that count masks, commits all candidates that reach the threshold, and always the
    best one.
    """

    def wanted(self) -> ScorePick:
        threshold = self.params.threshold
        if self.params.counts_masks:
            return ScorePick(1, math.nextafter(threshold, -math.inf))
        return ScorePick(self._quota(), threshold)


class FirstMasked(Quota):
    """Commits the first masked positions, regardless of confidence."""

    def wanted(self) -> ScorePick:
        return ScorePick(self._quota(), in_order=True)


class EntropyBounded(GridRule):
    """Commits the lowest entropies while their sum is below the threshold, and always the lowest.

    If the model proposes only the mask token, the next forward forbids it.
    """

    drawn = CandidateScoring(score="negative_entropy", epsilon=1e-12, draw="filtered")

    def choose(self, candidates: Candidates) -> Array:
        order = most_certain_first(candidates.scores)
        # Sum in fp32, as the reference's cumsum does.
        sums = torch.from_numpy(-candidates.scores[order]).float().cumsum(dim=0)
        chosen = order[: max(int((sums < self.params.threshold).sum()), 1)]
        self.forbid_mask_unless_changed(candidates, chosen)
        return chosen

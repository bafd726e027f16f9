# SPDX-License-Identifier: Apache-2.0
"""The hierarchical decoder of dInfer (arXiv:2510.08666): divides each run of masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding.until_filled import UntilFilledRule, with_best

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Candidates, Mask


class Hierarchy(UntilFilledRule):
    """Commits the best candidate of every run of masked positions, so that long runs split quickly.

    A run is a maximal sequence of consecutive masked positions. Its best candidates (all with equal
    confidence) are committed if they are above `low_threshold`, and other candidates if they are
    above `threshold`. The best candidate of all is always committed.
    """

    def accept(self, candidates: Candidates) -> Mask:
        scores = np.nan_to_num(candidates.scores, nan=-np.inf)
        starts_run = np.diff(candidates.positions, prepend=-1) > 1
        starts_run[0] = True
        best = np.maximum.reduceat(scores, starts_run.nonzero()[0])[starts_run.cumsum() - 1]
        is_best_of_run = (scores == best) & (scores > self.params.low_threshold)
        return with_best(is_best_of_run | (scores > self.params.threshold), scores)

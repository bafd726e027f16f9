# SPDX-License-Identifier: Apache-2.0
"""The hierarchical decoder of dInfer (arXiv:2510.08666): divide each run of masks and conquer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.decoding.until_filled import UntilFilledRule, with_best

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Candidates, Mask


class Hierarchy(UntilFilledRule):
    """Commit the best of every run of masked positions, so that long runs fall apart quickly.

    A run is a maximal sequence of consecutive masked positions. Its best candidates (all of equal
    confidence) are committed if they are above `low_threshold`, further ones above `threshold`,
    and the best of all in any case.
    """

    def accept(self, candidates: Candidates) -> Mask:
        scores = np.nan_to_num(candidates.scores, nan=-np.inf)
        starts_run = np.diff(candidates.positions, prepend=-1) > 1
        starts_run[0] = True
        best = np.maximum.reduceat(scores, starts_run.nonzero()[0])[starts_run.cumsum() - 1]
        is_best_of_run = (scores == best) & (scores > self.params.low_threshold)
        return with_best(is_best_of_run | (scores > self.params.threshold), scores)

# SPDX-License-Identifier: Apache-2.0
"""The hierarchical decoder of dInfer (arXiv:2510.08666): divide each run of masks and conquer."""

from __future__ import annotations

import torch

from vllm.diffusion.decoding.base import Candidates, UntilFilledRule, and_the_best


class Hierarchy(UntilFilledRule):
    """Commit the best of every run of masked positions, so that long runs fall apart quickly.

    A run is a maximal sequence of consecutive masked positions. Its best candidates (all of equal
    confidence) are committed if they are above `low_threshold`, further ones above `threshold`,
    and the best of all in any case.
    """

    def accept(self, candidates: Candidates) -> torch.Tensor:
        scores = torch.nan_to_num(candidates.scores, nan=-torch.inf)
        starts_run = torch.ones_like(scores, dtype=torch.bool)
        starts_run[1:] = candidates.positions.diff() > 1
        run = starts_run.cumsum(dim=0) - 1
        best = torch.full((int(run[-1]) + 1,), -torch.inf, dtype=scores.dtype)
        best = best.scatter_reduce(0, run, scores, "amax")[run]
        is_best_of_run = (scores == best) & (scores > self.params.low_threshold)
        return and_the_best(is_best_of_run | (scores > self.params.threshold), scores)

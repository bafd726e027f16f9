# SPDX-License-Identifier: Apache-2.0
"""Parallel decoding: commits all candidates that are certain enough.

The criteria are a confidence threshold, a factor (Fast-dLLM, Wu et al., arXiv:2505.22618; its
dynamic transfer), a margin between Fréchet bounds (Fast-dLLM++, arXiv:2606.02955), and an entropy
threshold (SGLang's EntropyThreshold, for models of d3LLM, arXiv:2601.07568).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Candidates, most_certain_first
from vllm.diffusion.decoding.until_filled import UntilFilledRule, with_best

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Mask


class Threshold(UntilFilledRule):
    """Commits every candidate whose confidence reaches the threshold, and always the best one."""

    def accept(self, candidates: Candidates) -> Mask:
        scores = candidates.scores
        return with_best(scores >= self.params.threshold, scores)


class EntropyThreshold(UntilFilledRule):
    """Commits every candidate whose entropy is below the threshold, and always the lowest one."""

    scoring = CandidateScoring(score="negative_entropy", epsilon=1e-8)

    def accept(self, candidates: Candidates) -> Mask:
        scores = candidates.scores
        return with_best(-scores < self.params.threshold, scores)


class Factor(UntilFilledRule):
    """Commits the largest number of the most certain candidates that the factor allows.

    The more candidates are committed together, the more certain each of them must be. With
    `frechet_margin`, the margin replaces the factor.
    """

    def accept(self, candidates: Candidates) -> Mask:
        order = most_certain_first(candidates.scores)
        ordered = np.nan_to_num(candidates.scores, nan=-np.inf)[order]
        margin, factor = self.params.frechet_margin, self.params.factor
        count = (
            num_within_factor(ordered, factor)
            if margin is None
            else num_within_margin(ordered, margin)
        )
        accepted = np.zeros(order.size, dtype=np.bool_)
        accepted[order[:count]] = True
        return accepted


def num_within_factor(scores: Array, factor: float) -> int:
    """Return how many of `scores` [R] float64, descending, are certain enough to go together.

    The n-th best fails below 1 - factor / (n + 1), from n = 2, so the best one never fails. All
    candidates before the first failure go together. As in the reference, a failure of the last
    candidate alone is ignored.
    """
    limits = 1 - factor * (1 / np.arange(2.0, scores.size + 2))
    limits[0] = -np.inf
    failures = (scores < limits).nonzero()[0]
    last = scores.size - 1
    first_failure = int(failures[0]) if failures.size else last
    return first_failure + (first_failure == last)


def num_within_margin(scores: Array, margin: float) -> int:
    """Return how many of `scores` [R] float64, descending, leave a margin between two bounds.

    Whatever their dependence, the n best candidates are all right with a probability of at least
    L = c_1 + ... + c_n - (n - 1) (Fréchet). Another choice has a probability of at most
    U = 1 - c_n, because it changes at least one candidate. The largest n with L - U > margin is
    returned, and at least 1. L - U does not grow with n, so all smaller n satisfy it, too.
    """
    lower = np.cumsum(scores) - np.arange(scores.size)
    return max(1, int(np.count_nonzero(lower - (1 - scores) > margin)))

# SPDX-License-Identifier: Apache-2.0
"""Parallel decoding by a factor (Fast-dLLM, Wu et al., arXiv:2505.22618, dynamic transfer).

The more candidates are committed together, the more certain each must be.
"""

from __future__ import annotations

import torch

from vllm.diffusion.decoding.base import Candidates, UntilFilledRule, most_certain_first


def num_accepted(scores: torch.Tensor, factor: float) -> int:
    """How many of `scores` [R] float64, descending, are certain enough to go together.

    The n-th best fails below 1 - factor / (n + 1), from n = 2. As many are taken as come before
    the first failure, or before the last candidate where none fails. One more is taken where that
    would be none, or all but the last: so a failure of the last alone does not count, as in the
    reference.
    """
    ranks = torch.arange(scores.numel(), dtype=torch.float64)
    limits = 1 - factor / (ranks + 2)
    limits[0] = -torch.inf
    failures = (scores < limits).nonzero()
    last = scores.numel() - 1
    first_failure = int(failures[0]) if failures.numel() else last
    return first_failure + (first_failure in (0, last))


class Factor(UntilFilledRule):
    """Commit the longest run of the most certain candidates that the factor allows."""

    def accept(self, candidates: Candidates) -> torch.Tensor:
        order = most_certain_first(candidates.scores)
        ordered = torch.nan_to_num(candidates.scores, nan=-torch.inf)[order]
        accepted = torch.zeros_like(order, dtype=torch.bool)
        accepted[order[: num_accepted(ordered, self.params.factor)]] = True
        return accepted

# SPDX-License-Identifier: Apache-2.0
"""Parallel decoding by a confidence threshold (Fast-dLLM, Wu et al., arXiv:2505.22618)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding.base import Candidates, UntilFilledRule, and_the_best

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Mask


class Threshold(UntilFilledRule):
    """Commit every candidate whose confidence reaches the threshold, and always the best one."""

    def accept(self, candidates: Candidates) -> Mask:
        scores = candidates.scores
        return and_the_best(scores >= self.params.threshold, scores)

# SPDX-License-Identifier: Apache-2.0
"""Parallel decoding by an entropy threshold, one block after the other (SGLang's EntropyThreshold).

Made for models of d3LLM (arXiv:2601.07568).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding.base import Candidates, UntilFilledRule, and_the_best
from vllm.diffusion.scoring import Scoring

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Mask


class EntropyThreshold(UntilFilledRule):
    """Commit every candidate whose entropy is below the threshold, and always the lowest one."""

    scoring = Scoring(score="negative_entropy", epsilon=1e-8)

    def accept(self, candidates: Candidates) -> Mask:
        scores = candidates.scores
        return and_the_best(-scores < self.params.threshold, scores)

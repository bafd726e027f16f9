# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM v2 (Wu et al., arXiv:2509.26328): blocks that are filled part by part.

The previous block predicts the first token of a block.
"""

from __future__ import annotations

from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Array, Candidates, ForwardTarget
from vllm.diffusion.decoding.block_grid import GridRule
from vllm.diffusion.decoding.until_filled import with_best


class HierarchyBlock(GridRule):
    """Commits, in the first part with masks, candidates above the threshold, and always the best.

    Logits are shifted: the last row of a block of final tokens predicts the first token after the
    block. So a forward of the previous block commits the first position of a block alone: its most
    likely token at any temperature, but never the mask token. If a forward proposes only the mask
    token, the next forward forbids it.
    """

    drawn = CandidateScoring(draw="filtered", greedy=True)
    _is_seed = False

    def target(self, masked: Array) -> ForwardTarget:
        start, first, length = self.start, int(masked[0]), self.params.block_length
        self._is_seed = first == start > 0
        if self._is_seed:
            self.forbid_mask = True
            return ForwardTarget(masked[:1], (start - length, start))
        part_length = self.params.sub_block_length
        part_end = start + ((first - start) // part_length + 1) * part_length
        return ForwardTarget(masked[masked < part_end], self._rows)

    def choose(self, candidates: Candidates) -> Array:
        scores = candidates.scores
        chosen = with_best(scores > self.params.threshold, scores).nonzero()[0]
        self.forbid_mask_unless_changed(candidates, chosen)
        return chosen

    def replacement(self, candidates: Candidates) -> Array:
        if self._is_seed and candidates.greedy is not None:
            return candidates.greedy
        return candidates.tokens

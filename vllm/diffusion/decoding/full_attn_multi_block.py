# SPDX-License-Identifier: Apache-2.0
"""Several blocks at once, as in SGLang's FullAttnMultiBlock (its pull request 20615)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding.base import ForwardTarget
from vllm.diffusion.decoding.pipelined import PipelinedRule

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Mask
    from vllm.diffusion.request.params import DiffusionParams


class FullAttnMultiBlock(PipelinedRule):
    """Commits every candidate whose entropy is below the threshold.

    The first block is full from the start, and several blocks may start in one step. The last block
    may be shorter than the others.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self.start_block().is_full = True

    def plan(self, tokens: Array, masked: Mask) -> ForwardTarget:
        self.count_masked(masked)
        self.promote_blocks()
        while self.start_block_if_due(masked):
            pass
        return ForwardTarget(masked[: self.active_end].nonzero()[0], (0, len(masked)))

    def accept(self, scores: Array) -> Mask:
        return -scores < self.params.threshold

# SPDX-License-Identifier: Apache-2.0
"""The semi-autoregressive loop of LLaDA (Nie et al., arXiv:2502.09992, reference `generate`).

A block of m masked positions is filled in S steps: m // S positions per step, one more in each of
the first m % S steps, in descending order of confidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.decoding.base import BlockwiseRule, Candidates, Mask, most_certain_first

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array
    from vllm.diffusion.request.params import DiffusionParams


def transfer_quota(num_masked: int, num_steps: int, step: int) -> int:
    """Return the number of positions to commit at `step` (from 0) of `num_steps`.

    `num_masked` is the number of positions that are masked before the first step.
    """
    return num_masked // num_steps + (step < num_masked % num_steps)


class SemiAutoregressive(BlockwiseRule):
    """Commits a fixed quota per step. Steps without a quota commit nothing and are skipped.

    The quota is also spent on a position for which the model proposes the mask token. This position
    stays masked, as in the reference.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        if params.steps is None:
            raise ValueError("semi_ar: steps must be resolved, got None")
        self.steps_per_block = params.steps // params.num_blocks
        self._planned_block = -1
        self._num_masked = 0
        self._step = 0

    def block_wants_forward(self, masked: Mask) -> bool:
        if self._planned_block != self.block:
            self._planned_block = self.block
            self._num_masked = int(masked.sum())
            self._step = 0
        return self._step < self.steps_per_block and self._quota() > 0

    def choose(self, candidates: Candidates) -> Array:
        quota = self._quota()
        self._step += 1
        return most_certain_first(candidates.scores)[:quota]

    def _quota(self) -> int:
        return transfer_quota(self._num_masked, self.steps_per_block, self._step)

# SPDX-License-Identifier: Apache-2.0
"""The credit decoder of dInfer (arXiv:2510.08666): tokens that stay likely gain logits.

Each masked position of the block has a credit for every token. In every forward the credits decay,
and the likeliest token earns p^gamma. The threshold decoder of dInfer then uses logits + alpha
ln(credit + 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.decoding.until_filled import UntilFilledRule

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Candidates, ForwardTarget, Mask
    from vllm.diffusion.request.params import DiffusionParams

ALPHA = 0.7  # weight of the credits
BETA = 0.8  # decay of the credits per forward
GAMMA = 0.2  # exponent of the probability that a token earns
SLACK = 1e-5  # confidences within this distance of the best one count as equal to it
LOWEST = -1000.0  # floor for (best confidence - SLACK) if no candidate exists


class Credit(UntilFilledRule):
    """Commits every candidate whose confidence reaches the threshold, or else the best ones.

    Confidences are computed from the adjusted logits. Positions whose best token is the mask token
    do not take part. If no position is left, nothing is committed and the next forward forbids the
    mask token.
    """

    adjusts_logits = True

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self._credited = torch.empty(0, dtype=torch.int64)  # positions, ascending
        self._credits: torch.Tensor | None = None  # [credited positions, V] fp32
        self._credited_block = -1

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        target = super().prepare(tokens)
        if target is None or self._takes_all:
            self._credits = None
        elif self._credited_block != self.block:
            self._credited_block, self._credits = self.block, None
            self._credited = torch.from_numpy(target.eligible)
        return target

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self._takes_all:
            return logits
        if self._credits is None:
            shape = (self._credited.numel(), logits.shape[1])
            self._credits = torch.zeros(shape, dtype=torch.float32, device=logits.device)
        on_canvas = self._credited.to(positions.device) - self.prompt_length
        rows = torch.searchsorted(on_canvas, positions)
        likeliest, tokens = torch.softmax(logits.float(), dim=-1).max(dim=-1)
        credits = BETA * self._credits[rows]
        credits.scatter_add_(1, tokens[:, None], likeliest[:, None] ** GAMMA)
        self._credits[rows] = credits
        return logits + ALPHA * torch.log(credits + 1)

    def accept(self, candidates: Candidates) -> Mask:
        eligible: Mask = candidates.tokens != self.params.mask_id
        if not eligible.any():
            return eligible
        scores = np.nan_to_num(candidates.scores, nan=LOWEST, neginf=LOWEST)
        nearly_best = max(float(scores[eligible].max()) - SLACK, LOWEST)
        eligible &= scores >= min(nearly_best, self.params.threshold)
        return eligible

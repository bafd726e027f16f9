# SPDX-License-Identifier: Apache-2.0
"""Dream's schedule (Ye et al., arXiv:2508.15487, reference `diffusion_generate`).

Time falls from 1 to eps in equal steps. A step from t to s commits the share 1 - s / t of the
masked positions, anywhere in the sequence, and the last step commits all of them. There are no
blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.core.random_streams import CHOICE, COMMIT
from vllm.diffusion.core.scoring import CandidateScoring
from vllm.diffusion.decoding.base import Candidates, DecodingRule, ForwardTarget, most_certain_first

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array
    from vllm.diffusion.request.params import DiffusionParams

SCORINGS = {
    "origin": CandidateScoring(draw="categorical"),
    "maskgit_plus": CandidateScoring(draw="categorical"),
    "topk_margin": CandidateScoring(score="margin", draw="categorical"),
    "entropy": CandidateScoring(score="negative_entropy", epsilon=1e-10, draw="categorical"),
}


def commit_shares(steps: int, eps: float, alg: str = "entropy") -> Array:
    """Return the share of the masked positions that each step commits, [steps] fp32.

    The dtype is that of the reference, because counts are rounded down.
    """
    # DiffuLLaMA: mathematically equal, without rounding.
    if eps == 0 and alg == "origin":
        return (1 / torch.arange(steps, 0, -1, dtype=torch.float32)).numpy()
    times = torch.linspace(1, eps, steps + 1, dtype=torch.float32)
    shares = 1 - times[1:] / times[:-1]
    shares[-1] = 1
    return shares.numpy()


def _commits(num_masked: int, shares: Array) -> Array:
    """Return the number of masked positions for each share, rounded down."""
    return (np.float32(num_masked) * shares).astype(np.int64)


class Dream(DecodingRule):
    """Commits a share of the masked positions in every step: the best, or drawn at random.

    `alg: origin` commits each position with the share as its probability. All other algorithms
    commit a number of positions, the share rounded down: the most certain positions, or, with
    `alg_temp`, positions drawn without replacement from the softmax of score / alg_temp (by the
    Gumbel-max method).

    Steps whose share is less than one position commit nothing and are skipped. One more forward
    fills the positions that are masked after the last step.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        if params.steps is None:
            raise ValueError("dream: steps must be resolved, got None")
        self.scoring = SCORINGS[params.alg]
        if params.alg == "origin":
            self.draw_purpose = COMMIT
        elif params.alg_temp > 0:
            self.draw_purpose = CHOICE
        self._shares = commit_shares(params.steps, params.eps, params.alg)
        self._step = 0

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        masked = tokens == self.params.mask_id
        eligible = masked.nonzero()[0]
        if self._step == self.params.steps or eligible.size == 0:
            return self.fill_remaining(masked)
        if self.params.alg != "origin":
            counts = _commits(eligible.size, self._shares[self._step :])
            self._step += int(counts.nonzero()[0][0])  # the last step commits all
        return ForwardTarget(eligible, (0, len(masked)))

    def choose(self, candidates: Candidates) -> Array:
        share = self._shares[self._step]
        self._step += 1
        draws = candidates.draws
        if self.draw_purpose is not None and draws is None:
            raise ValueError(f"draws: alg {self.params.alg} needs them, got None")
        if self.params.alg == "origin" and draws is not None:
            return (draws < float(share)).nonzero()[0]
        count = int(_commits(candidates.positions.size, share))
        scores = candidates.scores
        if draws is not None:
            noise = torch.log(-torch.log(torch.from_numpy(draws)))
            scores = (torch.from_numpy(scores) / self.params.alg_temp - noise).numpy()
        return most_certain_first(scores)[:count]

# SPDX-License-Identifier: Apache-2.0
"""How Dream draws and scores a token (Ye et al., arXiv:2508.15487, reference `diffusion_generate`).

Temperature, top-p and top-k come before the softmax, and the score is taken from what they leave.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm.diffusion.scoring import CATEGORICAL

if TYPE_CHECKING:
    from vllm.diffusion.sampling.noise import NoiseSource
    from vllm.diffusion.sampling.rows import RowGroup


def draw_categorical(
    logits: torch.Tensor, group: RowGroup, noise: NoiseSource
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token [R] int64 and score [R] of every row of `logits` [R, V].

    At temperature 0 the token is the argmax of the probabilities (the lowest id among those that
    round to the same number). Otherwise it is drawn by the Gumbel-max method.
    """
    params = group.params
    if params.temperature > 0:
        logits = logits / params.temperature
    if params.top_p is not None and params.top_p < 1:
        logits = _keep_top_p(logits, params.top_p)
    if params.top_k is not None:
        logits = _keep_top_k(logits, params.top_k)
    probabilities = torch.softmax(logits, dim=-1)
    if params.temperature > 0:
        columns = range(logits.shape[1])
        u = noise.uniform(group.seed, CATEGORICAL, group.step, group.positions, columns)
        tokens = (probabilities.double().log() - torch.log(-torch.log(u))).argmax(dim=-1)
        scores = probabilities.gather(1, tokens[:, None])[:, 0]
    else:
        scores, tokens = probabilities.max(dim=-1)
    if group.scoring.score == "margin":
        best = probabilities.topk(2, dim=-1).values
        scores = best[:, 0] - best[:, 1]
    elif group.scoring.score == "negative_entropy":
        scores = (probabilities * torch.log(probabilities + group.scoring.epsilon)).sum(dim=-1)
    return tokens, scores


def _keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Remove what lies beyond the first entry whose cumulative probability exceeds `top_p`."""
    ordered, columns = torch.sort(logits, descending=True, stable=True)
    beyond = torch.softmax(ordered, dim=-1).cumsum(dim=-1) > top_p
    beyond = torch.cat([torch.zeros_like(beyond[:, :1]), beyond[:, :-1]], dim=1)
    removed = torch.zeros_like(beyond).scatter(1, columns, beyond)
    return logits.masked_fill(removed, torch.finfo(logits.dtype).min)


def _keep_top_k(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Remove what is below the k-th largest; ties with it stay."""
    least = logits.topk(min(top_k, logits.shape[1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < least, torch.finfo(logits.dtype).min)

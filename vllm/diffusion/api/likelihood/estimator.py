# SPDX-License-Identifier: Apache-2.0
"""Monte Carlo estimate of the likelihood of a continuation under a masked diffusion model.

The estimator is that of LLaDA's authors (Nie et al., arXiv:2502.09992, Algorithm 3, and their
`eval_llada.py`). Each sample masks x of the L tokens of a continuation, with x from 1 to L and the
masked tokens drawn by a permutation. The log likelihood of the masked tokens times L / x is an
unbiased estimate of a lower bound of the log likelihood. Numbers and permutations are drawn in the
order of the published script, from the generator that it seeds.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Masking = tuple[int, ...]  # masked positions of the continuation, ascending from 0


class Estimate(NamedTuple):
    """A log likelihood and its standard error, which is None if a single sample cannot give one."""

    loglikelihood: float
    stderr: float | None


def draw_maskings(length: int, mc_num: int, batch_size: int, seed: int) -> list[Masking]:
    """Draw the maskings of `mc_num` samples, in batches that each use one random number k.

    Args:
        length: L, tokens of the continuation, at least one.
        mc_num: number of samples, a multiple of `batch_size`.
        batch_size: samples whose numbers of masks are spread evenly over 1 to L, starting at k.
        seed: seed of the generator.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Masking] = []
    for _ in range(mc_num // batch_size):
        k = int(torch.randint(1, length + 1, (), generator=generator))
        last = k + (batch_size - 1) * (length / batch_size)
        spread = torch.linspace(float(k), last, steps=batch_size).round().long()
        for count in ((spread - 1) % length + 1).tolist():
            order = torch.randperm(length, generator=generator)
            # Position j is masked if the permutation assigns it one of the first `count` numbers.
            drawn.append(tuple((order < count).nonzero()[:, 0].tolist()))
    return drawn


def estimate(
    maskings: Sequence[Masking], logprobs: Mapping[Masking, Sequence[float]], length: int
) -> Estimate:
    """Compute the estimate from samples.

    The standard error assumes independent samples. The samples of a batch are spread evenly, so it
    is an overestimate.

    Args:
        maskings: masking of every sample.
        logprobs: by masking, the log probabilities of the masked tokens.
        length: tokens of the continuation.
    """
    samples = [length / len(masked) * math.fsum(logprobs[masked]) for masked in maskings]
    mean = math.fsum(samples) / len(samples)
    if len(set(samples)) == 1 and length == 1:
        return Estimate(mean, 0.0)
    if len(samples) == 1:
        return Estimate(mean, None)
    return Estimate(mean, statistics.stdev(samples) / math.sqrt(len(samples)))

# SPDX-License-Identifier: Apache-2.0
"""Choice of a token per row of logits, with its probability, over one or several ranks."""

from __future__ import annotations

import torch

from flash_sample import low_confidence
from flash_sample.philox import uniform
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)


def philox_uniform(
    seed: int, purpose: int, step: int, positions: torch.Tensor, columns: range
) -> torch.Tensor:
    """Uniform numbers [R, len(columns)] float64 in (0, 1) for canvas `positions` [R] int64."""
    return uniform(seed, purpose, step, positions, (columns.start, columns.stop))


def most_likely(
    logits: torch.Tensor,
    noisy: torch.Tensor,
    *,
    vocab_start: int,
    excluded: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token with the largest noisy logit, and its probability under the noise-free logits.

    Args:
        logits: [R, C] noise-free logits of this rank's columns.
        noisy: [R, C] what the token is chosen by; `logits` itself when there is no noise.
        vocab_start: token id of this rank's first column.
        excluded: token ids whose probability is zero although they may be chosen.
        dtype: precision of the softmax.

    Returns:
        token [R] int64 (the lowest id among equals) and probability [R] in `dtype`.
    """
    columns = range(vocab_start, vocab_start + logits.shape[1])
    local = tuple(i - vocab_start for i in excluded if i in columns)
    if get_tensor_model_parallel_world_size() > 1:
        return _most_likely_sharded(logits, noisy, vocab_start, local, dtype)
    if noisy is logits and dtype == torch.float32:
        return low_confidence(logits, excluded=local)
    token = noisy.argmax(dim=-1)
    probabilities = torch.softmax(_without(logits, local).to(dtype), dim=-1)
    return token, probabilities.gather(1, token[:, None])[:, 0].nan_to_num(0.0)


def _without(logits: torch.Tensor, columns: tuple[int, ...]) -> torch.Tensor:
    if not columns:
        return logits
    logits = logits.clone()
    logits[:, list(columns)] = -torch.inf
    return logits


def _most_likely_sharded(
    logits: torch.Tensor,
    noisy: torch.Tensor,
    vocab_start: int,
    excluded: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Five numbers per row cross the ranks: noisy maximum, token and its logit, maximum, sum."""
    best, token = noisy.double().max(dim=-1)
    kept = _without(logits, excluded).double()
    chosen = kept.gather(1, token[:, None])[:, 0]
    top = kept.amax(dim=-1)
    total = torch.exp(kept - top[:, None]).sum(dim=-1).nan_to_num(0.0)
    mine = torch.stack([best, (token + vocab_start).double(), chosen, top, total], dim=-1)
    ranks = tensor_model_parallel_all_gather(mine, dim=-1).view(mine.shape[0], -1, 5)
    winner = ranks[:, :, 0].argmax(dim=-1, keepdim=True)  # first rank among equals: lowest id
    token = ranks[:, :, 1].gather(1, winner)[:, 0].long()
    chosen = ranks[:, :, 2].gather(1, winner)[:, 0]
    top = ranks[:, :, 3].amax(dim=-1, keepdim=True)
    total = (ranks[:, :, 4] * torch.exp(ranks[:, :, 3] - top)).sum(dim=-1)
    probability = torch.exp(chosen - top[:, 0]) / total
    return token, probability.nan_to_num(0.0).to(dtype)

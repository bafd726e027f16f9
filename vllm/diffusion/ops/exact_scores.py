# SPDX-License-Identifier: Apache-2.0
"""Probabilities of tokens in PyTorch, at any precision and over one or several ranks.

The kernels support neither float64 nor precomputed noise.
"""

from __future__ import annotations

import torch

from vllm.diffusion.ops.collectives import add_in_order, tensor_parallel


def most_likely(
    logits: torch.Tensor,
    noisy: torch.Tensor,
    *,
    first_column: int,
    whole_rows: bool,
    excluded: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token with the largest noisy logit, and its noise-free probability.

    Args:
        logits: [R, C] noise-free logits of this rank's columns.
        noisy: [R, C] logits that choose the token; `logits` itself without noise.
        first_column: token id of the first column.
        whole_rows: whether a row has the columns of all ranks.
        excluded: token ids whose probability counts as zero, although they may be chosen.
        dtype: precision of the softmax.

    Returns:
        token [R] int64 (the lowest id among equals) and probability [R] in `dtype`: zero in a row
        of -inf, and NaN in a row with NaN or +inf.
    """
    local = _local_columns(excluded, first_column, logits.shape[1])
    if not whole_rows:
        return _most_likely_sharded(logits, noisy, first_column, local, dtype)
    token = noisy.argmax(dim=-1)
    kept = without_columns(logits, local).to(dtype)
    probability = torch.softmax(kept, dim=-1).gather(1, token[:, None])[:, 0]
    return token, probability.masked_fill(kept.amax(dim=-1) == -torch.inf, 0.0)


def negative_entropy(
    logits: torch.Tensor,
    *,
    epsilon: float,
    first_column: int,
    whole_rows: bool,
    excluded: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return sum p log(p + epsilon) of every row, [R] in `dtype`; arguments: see `most_likely`."""
    local = _local_columns(excluded, first_column, logits.shape[1])
    kept = without_columns(logits, local).to(dtype)
    if whole_rows:
        p = torch.softmax(kept, dim=-1)
        return (p * torch.log(p + epsilon)).sum(dim=-1)
    top, total = whole_softmax(kept.double())
    p = torch.exp(kept.double() - top) / total
    share = (p * torch.log(p + epsilon)).sum(dim=-1)
    return add_in_order(tensor_parallel().gather(share)).to(dtype)


def _local_columns(tokens: tuple[int, ...], first: int, count: int) -> tuple[int, ...]:
    return tuple(token - first for token in tokens if first <= token < first + count)


def without_columns(logits: torch.Tensor, columns: tuple[int, ...]) -> torch.Tensor:
    """Return `logits` [R, C] with -inf in some columns, as a copy if there are any."""
    if not columns:
        return logits
    logits = logits.clone()
    # A list as an index would make the host wait for the device.
    for column in columns:
        logits[:, column] = -torch.inf
    return logits


def whole_softmax(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maximum and sum of exp [R, 1] over all ranks' columns, from this rank's [R, C]."""
    top = kept.amax(dim=-1, keepdim=True)
    total = torch.exp(kept - top).sum(dim=-1, keepdim=True).nan_to_num(0.0)
    tops, totals = tensor_parallel().gather(torch.stack([top, total])).unbind(dim=1)
    whole = tops.amax(dim=0)
    return whole, add_in_order(totals * torch.exp(tops - whole))


def _most_likely_sharded(
    logits: torch.Tensor,
    noisy: torch.Tensor,
    first_column: int,
    excluded: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose over several ranks.

    Five numbers per row are exchanged: noisy maximum, token, its logit, maximum and sum of exp.
    """
    best, token = noisy.double().max(dim=-1)
    kept = without_columns(logits, excluded).double()
    chosen = kept.gather(1, token[:, None])[:, 0]
    mine = torch.stack([best, (token + first_column).double(), chosen], dim=-1)
    ranks = tensor_parallel().gather(mine).transpose(0, 1)
    # The first rank among equals has the lowest id.
    winner = ranks[:, :, 0].argmax(dim=-1, keepdim=True)
    token = ranks[:, :, 1].gather(1, winner)[:, 0].long()
    chosen = ranks[:, :, 2].gather(1, winner)[:, 0]
    top, total = whole_softmax(kept)
    probability = torch.exp(chosen - top[:, 0]) / total[:, 0]
    return token, probability.masked_fill(top[:, 0] == -torch.inf, 0.0).to(dtype)

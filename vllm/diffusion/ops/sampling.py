# SPDX-License-Identifier: Apache-2.0
"""Choice of a token per row of logits, with its probability, over one or several ranks."""

from __future__ import annotations

import torch

import flash_sample
import gather_gemm
from flash_sample import Filters, Rows, Sampled, Score
from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.collectives import tensor_parallel
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

# What leaving out the epsilon may change an entropy by, in nats: what fp32 sums are good to.
_NEGLIGIBLE_NATS = 2e-5


def philox_uniform(
    seed: int | torch.Tensor,
    purpose: int,
    step: int | torch.Tensor,
    positions: torch.Tensor,
    columns: range,
) -> torch.Tensor:
    """Return uniform numbers [R, len(columns)] float64 in (0, 1) for `positions` [R] int64.

    They come from the counter-based generator Philox4x32-10 (Salmon et al., SC 2011). A number is a
    function of its five arguments alone, so it does not depend on batch neighbours, chunks, device
    or rank. Positions are relative to the canvas. Seed and step may be int64 [R], for rows of
    different requests.
    """
    return flash_sample.uniform(seed, purpose, step, positions, (columns.start, columns.stop))


def candidates(
    logits: torch.Tensor, rows: Rows, score: Score, *, first_column: int, vocab_size: int
) -> Sampled:
    """Return token, fp32 score and greedy token of rows of many requests, in one launch.

    Args:
        logits: [R, C] logits of this rank's columns.
        rows: sampling parameters of each row; see `flash_sample.Rows`.
        score: "confidence", "entropy" (nats) or "margin".
        first_column: token id of the first column.
        vocab_size: columns of all ranks; only 64 bytes a row cross the ranks, but all columns of
            rows with filters.
    """
    if rows.filters is not None:
        logits, first_column = gather_columns(logits, vocab_size), 0
    if logits.shape[1] == vocab_size:
        return flash_sample.candidates(logits, rows, score)
    record = flash_sample.partial(logits, rows, score, first_column=first_column)
    records = tensor_parallel().gather(record)
    found = flash_sample.merge(records, rows, score)
    epsilon = rows.epsilon
    if score != "entropy" or _is_negligible(epsilon, vocab_size):
        return found
    share = flash_sample.entropy_share(logits, records, rows, first_column=first_column)
    return found._replace(score=tensor_parallel().gather(share).sum(dim=0))


def kept_columns(
    logits: torch.Tensor, temperature: float | torch.Tensor, filters: Filters
) -> torch.Tensor:
    """Return whether filters keep each column, bool [R, V], of whole rows of logits [R, V]."""
    return flash_sample.kept_columns(logits, temperature, filters)


def samples_in_head(x: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Whether `most_likely_in_head` is faster than storing logits and `candidates`."""
    if not x.is_cuda or not dispatch.samples_in_head(len(x), len(matrix), x.device):
        return False
    return gather_gemm.has_top(x, matrix)


def most_likely_in_head(x: torch.Tensor, matrix: torch.Tensor, rows: Rows) -> Sampled:
    """Return token and fp32 confidence of rows, without storing their logits.

    Args:
        x: [R, D] normed hidden states.
        matrix: [V, D], the output matrix.
        rows: sampling parameters of each row; without noise, and with at most 4 special columns.
    """
    top = gather_gemm.gather_top(
        x, None, matrix, columns=rows.columns, forbidden=rows.forbidden, excluded=rows.excluded
    )
    return Sampled(top.column, top.probability, top.column)


def gather_columns(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gather whole rows [R, vocab_size] from the columns [R, C] of every rank.

    For results that cannot be merged from parts.
    """
    if logits.shape[1] == vocab_size or get_tensor_model_parallel_world_size() == 1:
        return logits
    # Ranks own equal shares of the vocabulary rounded up; the last ones may have fewer columns.
    widest = pad_vocab_size(vocab_size) // get_tensor_model_parallel_world_size()
    padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
    ranks = tensor_parallel().gather(padded)
    return ranks.transpose(0, 1).reshape(len(logits), -1)[:, :vocab_size]


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

    Written in PyTorch, for what `candidates` does not do: float64, and noise given as numbers.

    Args:
        logits: [R, C] noise-free logits of this rank's columns.
        noisy: [R, C] logits that choose the token; `logits` itself when there is no noise.
        first_column: token id of the first column.
        whole_rows: whether the columns are those of all ranks.
        excluded: token ids whose probability is zero although they may be chosen.
        dtype: precision of the softmax.

    Returns:
        token [R] int64 (the lowest id among equals) and probability [R] in `dtype`.
    """
    local = _local_columns(excluded, first_column, logits.shape[1])
    if not whole_rows:
        return _most_likely_sharded(logits, noisy, first_column, local, dtype)
    token = noisy.argmax(dim=-1)
    probabilities = torch.softmax(_without(logits, local).to(dtype), dim=-1)
    return token, probabilities.gather(1, token[:, None])[:, 0].nan_to_num(0.0)


def negative_entropy(
    logits: torch.Tensor,
    *,
    epsilon: float,
    first_column: int,
    whole_rows: bool,
    excluded: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return sum p log(p + epsilon) of every row, [R] in `dtype`; arguments as `most_likely`."""
    kept = _without(logits, _local_columns(excluded, first_column, logits.shape[1])).to(dtype)
    if whole_rows:
        p = torch.softmax(kept, dim=-1)
        return (p * torch.log(p + epsilon)).sum(dim=-1)
    top, total = _whole_softmax(kept.double())
    p = torch.exp(kept.double() - top) / total
    share = (p * torch.log(p + epsilon)).sum(dim=-1)
    return tensor_parallel().gather(share).sum(dim=0).to(dtype)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, first_column: int, vocab_size: int
) -> torch.Tensor:
    """Return log probabilities [R, k] float64 of `token_ids` [R, k] int64 in rows of logits.

    Args:
        logits: [R, C] logits of this rank's columns.
        token_ids: ids below `vocab_size`.
        first_column: token id of the first column.
        vocab_size: columns of all ranks; only 2 + k numbers a row cross the ranks.
    """
    kept, num_columns = logits.double(), logits.shape[1]
    columns = token_ids - first_column
    is_here = (columns >= 0) & (columns < num_columns)
    found = kept.gather(1, columns.clamp(0, num_columns - 1)).masked_fill(~is_here, -torch.inf)
    if num_columns == vocab_size:
        return found - torch.logsumexp(kept, dim=-1, keepdim=True)
    top, total = _whole_softmax(kept)
    return tensor_parallel().gather(found).amax(dim=0) - top - total.log()


def _is_negligible(epsilon: float | torch.Tensor, vocab_size: int) -> bool:
    return not isinstance(epsilon, torch.Tensor) and epsilon * vocab_size <= _NEGLIGIBLE_NATS


def _local_columns(tokens: tuple[int, ...], first: int, count: int) -> tuple[int, ...]:
    return tuple(token - first for token in tokens if first <= token < first + count)


def _without(logits: torch.Tensor, columns: tuple[int, ...]) -> torch.Tensor:
    if not columns:
        return logits
    logits = logits.clone()
    for column in columns:  # a list as an index would make the host wait for the device
        logits[:, column] = -torch.inf
    return logits


def _whole_softmax(kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return maximum and sum of exp [R, 1] over all ranks' columns, from this rank's [R, C]."""
    top = kept.amax(dim=-1, keepdim=True)
    total = torch.exp(kept - top).sum(dim=-1, keepdim=True).nan_to_num(0.0)
    tops, totals = tensor_parallel().gather(torch.stack([top, total])).unbind(dim=1)
    whole = tops.amax(dim=0)
    return whole, (totals * torch.exp(tops - whole)).sum(dim=0)


def _most_likely_sharded(
    logits: torch.Tensor,
    noisy: torch.Tensor,
    first_column: int,
    excluded: tuple[int, ...],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose over several ranks.

    Five numbers per row cross the ranks: noisy maximum, token and its logit, maximum, sum.
    """
    best, token = noisy.double().max(dim=-1)
    kept = _without(logits, excluded).double()
    chosen = kept.gather(1, token[:, None])[:, 0]
    mine = torch.stack([best, (token + first_column).double(), chosen], dim=-1)
    ranks = tensor_parallel().gather(mine).transpose(0, 1)
    winner = ranks[:, :, 0].argmax(dim=-1, keepdim=True)  # first rank among equals: lowest id
    token = ranks[:, :, 1].gather(1, winner)[:, 0].long()
    chosen = ranks[:, :, 2].gather(1, winner)[:, 0]
    top, total = _whole_softmax(kept)
    probability = torch.exp(chosen - top[:, 0]) / total[:, 0]
    return token, probability.nan_to_num(0.0).to(dtype)

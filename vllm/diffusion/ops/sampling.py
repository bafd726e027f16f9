# SPDX-License-Identifier: Apache-2.0
"""Choice of a token per row of logits, with its probability, over one or several ranks."""

from __future__ import annotations

import torch

import flash_sample
import gather_gemm
from flash_sample import Filters, Rows, Sampled, Score
from vllm.diffusion.ops import dispatch
from vllm.diffusion.ops.collectives import add_in_order, tensor_parallel
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size

# Change of an entropy in nats that the epsilon may cause without being computed; it is the
# accuracy of fp32 sums.
_NEGLIGIBLE_NATS = 2e-5


def philox_uniform(
    seed: int | torch.Tensor,
    purpose: int,
    step: int | torch.Tensor,
    positions: torch.Tensor,
    columns: range,
) -> torch.Tensor:
    """Return uniform numbers [R, len(columns)] float64 in (0, 1) for `positions` [R] int64.

    The counter-based generator Philox4x32-10 (Salmon et al., SC 2011) computes them. A number is a
    function of its five arguments only, so it does not depend on the batch, chunks, device or
    rank. Positions are relative to the canvas. Seed and step may be int64 [R], for rows of
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
        vocab_size: columns of all ranks; only 64 bytes per row are exchanged, but all columns of
            rows with filters.
    """
    if rows.filters is not None:
        logits, first_column = gather_columns(logits, vocab_size), 0
    if logits.shape[1] == vocab_size:
        return flash_sample.candidates(logits, rows, score)
    record = flash_sample.partial(logits, rows, score, first_column=first_column)
    records = tensor_parallel().gather(record)
    merged = flash_sample.merge(records, rows, score)
    epsilon = rows.epsilon
    if score != "entropy" or _is_negligible(epsilon, vocab_size):
        return merged
    share = flash_sample.entropy_share(logits, records, rows, first_column=first_column)
    return merged._replace(score=add_in_order(tensor_parallel().gather(share)))


def kept_columns(
    logits: torch.Tensor, temperature: float | torch.Tensor, filters: Filters
) -> torch.Tensor:
    """Return whether filters keep each column, bool [R, V], for whole rows of logits [R, V]."""
    return flash_sample.kept_columns(logits, temperature, filters)


# maximum number of special columns for `most_likely_in_head`
MAX_HEAD_COLUMNS = gather_gemm.MAX_COLUMNS


def samples_in_head(x: torch.Tensor, matrix: torch.Tensor) -> bool:
    """Return whether `most_likely_in_head` is faster than storing logits and `candidates`."""
    if not x.is_cuda or not dispatch.samples_in_head(len(x), len(matrix), x.device):
        return False
    return gather_gemm.has_top(x, matrix)


def most_likely_in_head(x: torch.Tensor, matrix: torch.Tensor, rows: Rows) -> Sampled:
    """Return token and fp32 confidence of rows, without storing their logits.

    Args:
        x: [R, D] normalised hidden states.
        matrix: [V, D], the output matrix.
        rows: sampling parameters of each row; without noise, and with at most `MAX_HEAD_COLUMNS`
            special columns.
    """
    top = gather_gemm.gather_top(
        x, None, matrix, columns=rows.columns, forbidden=rows.forbidden, excluded=rows.excluded
    )
    return Sampled(top.column, top.probability, top.column)


def gather_columns(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gather whole rows [R, vocab_size] from the columns [R, C] of every rank.

    This is for results that cannot be merged from parts.
    """
    if logits.shape[1] == vocab_size or get_tensor_model_parallel_world_size() == 1:
        return logits
    # Ranks own equal shares of the vocabulary rounded up, so the last ranks may have fewer
    # columns.
    widest = pad_vocab_size(vocab_size) // get_tensor_model_parallel_world_size()
    padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
    ranks = tensor_parallel().gather(padded)
    return ranks.transpose(0, 1).reshape(len(logits), -1)[:, :vocab_size]


def _is_negligible(epsilon: float | torch.Tensor, vocab_size: int) -> bool:
    return not isinstance(epsilon, torch.Tensor) and epsilon * vocab_size <= _NEGLIGIBLE_NATS

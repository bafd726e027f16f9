# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of named tokens, over one or several ranks."""

from __future__ import annotations

import torch

import flash_sample
from flash_sample import RECORD_FIELDS, Rows
from flash_sample.rows import MAXIMUM, SUM_EXP, WEIGHTED
from vllm.diffusion.ops.collectives import add_in_order, tensor_parallel
from vllm.diffusion.ops.exact_scores import whole_softmax


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, first_column: int, vocab_size: int
) -> torch.Tensor:
    """Return log probabilities [R, k] float64 of `token_ids` [R, k] int64 in rows of logits.

    Args:
        logits: [R, C] logits of this rank's columns.
        token_ids: ids below `vocab_size`.
        first_column: token id of the first column.
        vocab_size: columns of all ranks; only 2 + k numbers per row are exchanged.
    """
    kept, named_logits = logits.double(), _own(logits, token_ids, first_column, vocab_size)
    if logits.shape[1] == vocab_size:
        return named_logits - torch.logsumexp(kept, dim=-1, keepdim=True)
    top, total = whole_softmax(kept)
    return tensor_parallel().gather(named_logits).amax(dim=0) - top - total.log()


def logprobs_and_entropies(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    rows: Rows,
    *,
    first_column: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log probabilities of tokens and the entropies of their rows, in nats.

    They have the precision of fp32 sums. The logits are read once and not copied.

    Args:
        logits: [R, C] noise-free logits of this rank's columns.
        token_ids: [R, k] int64, ids below `vocab_size`; none is forbidden.
        rows: forbidden and excluded columns, which have no probability; no noise or filters.
        first_column: token id of the first column.
        vocab_size: columns of all ranks; only 8 + k numbers per row are exchanged.

    Returns:
        [R, k] and [R], float64.
    """
    records = flash_sample.partial(logits, rows, "entropy", first_column=first_column)[None]
    named_logits = _own(logits, token_ids, first_column, vocab_size)
    if logits.shape[1] != vocab_size:
        ranks = tensor_parallel().gather(torch.cat([records[0], named_logits], dim=1))
        records, named_logits = ranks[..., :RECORD_FIELDS], ranks[..., RECORD_FIELDS:].amax(dim=0)
    maximum, total, weighted = (records[..., f] for f in (MAXIMUM, SUM_EXP, WEIGHTED))
    shares = maximum + total.log()
    top = shares.amax(dim=0)
    finite = top.masked_fill(top.isinf(), 0.0)
    whole = add_in_order((shares - finite).exp()).log() + finite
    # The mean of a rank without a finite logit is NaN, and its share is zero.
    means = (maximum + weighted / total) * (shares - whole).exp()
    entropies = whole - add_in_order(means.masked_fill(total == 0, 0.0))
    return named_logits - whole[:, None], entropies


def _own(
    logits: torch.Tensor, token_ids: torch.Tensor, first_column: int, vocab_size: int
) -> torch.Tensor:
    """Return the logits [R, k] float64 of tokens, with -inf for tokens in other ranks' columns."""
    if logits.shape[1] == vocab_size:
        return logits.gather(1, token_ids).double()
    columns, last = token_ids - first_column, logits.shape[1] - 1
    is_here = (columns >= 0) & (columns <= last)
    return logits.gather(1, columns.clamp(0, last)).double().masked_fill(~is_here, -torch.inf)

# SPDX-License-Identifier: Apache-2.0
"""Sampling of one request's rows in PyTorch's arithmetic, at any precision.

There are two ways to choose a token. Either it is the argmax of the noisy logits that min-p, top-k
and top-p keep at the temperature, and its score comes from the whole distribution. Or it is drawn
from its distribution, and its score comes from the filtered distribution:

- Dream (Ye et al., arXiv:2508.15487, reference `diffusion_generate`): temperature, top-p and top-k
  come before the softmax, and the score is taken from the filtered distribution.
- Block-causal families: temperature, top-k, top-p, in this order, and none of them at temperature
  0. LLaDA2.x and Fast-dLLM v2 score the filtered distribution; SDAR scores the distribution before
  top-k and top-p.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm.diffusion import ops
from vllm.diffusion.core.random_streams import CATEGORICAL, REMASKING, TOKEN

if TYPE_CHECKING:
    from vllm.diffusion.core.scoring import CandidateScoring
    from vllm.diffusion.sampling.row_group import RowGroup


def sample_plain(
    logits: torch.Tensor, group: RowGroup, first_column: int, vocab_size: int
) -> ops.Sampled:
    """Return token, score (larger is more certain) and greedy token of every row.

    Args:
        logits: [R, C], columns of this rank; may be overwritten.
        group: the request of these rows.
        first_column: token id of the first column.
        vocab_size: number of columns of all ranks.
    """
    params, scoring, filters = group.params, group.scoring, group.filters
    # Drawing and filtering work on whole rows, so ranks exchange their columns.
    if scoring.is_categorical or filters is not None:
        logits, first_column = ops.gather_columns(logits, vocab_size), 0
    columns = range(first_column, first_column + logits.shape[1])
    for token in set(group.forbidden) - set(group.counted):
        if token in columns:
            logits[:, token - first_column] = -torch.inf
    dtype = group.confidence_dtype(logits)
    if scoring.is_categorical:
        tokens, scores = draw_categorical(logits.to(dtype), group)
        if scoring.greedy and params.temperature > 0:
            kept = ops.without_columns(logits, group.counted)
            return ops.Sampled(tokens, scores, kept.argmax(-1))
        return ops.Sampled(tokens, scores, tokens)
    whole_rows = logits.shape[1] == vocab_size
    most_likely = partial(
        ops.most_likely, logits, first_column=first_column, whole_rows=whole_rows, dtype=dtype
    )
    counted = tuple(token - first_column for token in group.counted if token in columns)
    # Counted tokens are never chosen, but `logits` keeps their probability.
    noisy = allowed = ops.without_columns(logits, counted)
    excluded = group.excluded
    if params.temperature > 0:
        # Argmax of exp(l) / (-log U)^t in the log domain; float64 as in the reference.
        u = ops.philox_uniform(group.seed, TOKEN, group.step, group.positions, columns)
        noisy = allowed.double() - params.temperature * torch.log(-torch.log(u))
    if filters is not None:
        removed = ~ops.kept_columns(logits, params.temperature, filters)
        noisy = noisy.masked_fill(removed, -torch.inf)
    tokens, scores = most_likely(noisy, excluded=excluded)
    greedy = tokens
    if scoring.greedy and params.temperature > 0:
        greedy, _ = most_likely(allowed, excluded=())
    if params.remasking == "random":
        u = ops.philox_uniform(group.seed, REMASKING, group.step, group.positions, range(1))
        # If entropies are compared, the random number replaces the entropy.
        scores = -u[:, 0] if scoring.score == "negative_entropy" else u[:, 0]
    elif scoring.score == "negative_entropy":
        scores = ops.negative_entropy(
            logits,
            epsilon=scoring.epsilon,
            first_column=first_column,
            whole_rows=whole_rows,
            excluded=excluded,
            dtype=dtype,
        )
    return ops.Sampled(tokens, scores, greedy)


def draw_categorical(logits: torch.Tensor, group: RowGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token [R] int64 and score [R] of every row of `logits` [R, V].

    At temperature 0 the token is the argmax of the probabilities (the lowest id among probabilities
    that round to the same number). Otherwise it is drawn by the Gumbel-max method.
    """
    if group.params.temperature > 0:
        logits = logits / group.params.temperature
    whole, filters = logits, group.filters
    filtered = logits = ops.without_columns(whole, group.counted)
    if filters is not None:
        removed = ~ops.kept_columns(logits, 1.0, filters)
        filtered = logits.masked_fill(removed, torch.finfo(logits.dtype).min)
    probabilities = torch.softmax(filtered, dim=-1)
    if group.params.temperature > 0:
        columns = range(logits.shape[1])
        u = ops.philox_uniform(group.seed, CATEGORICAL, group.step, group.positions, columns)
        tokens = (probabilities.double().log() - torch.log(-torch.log(u))).argmax(dim=-1)
    else:
        tokens = probabilities.argmax(dim=-1)
    if group.counted or (group.scoring.scores_all and filters is not None):
        probabilities = torch.softmax(whole, dim=-1)
    return tokens, _scores(probabilities, tokens, group.scoring)


def _scores(
    probabilities: torch.Tensor, tokens: torch.Tensor, scoring: CandidateScoring
) -> torch.Tensor:
    """Return the scores [R] of tokens [R] in `probabilities` [R, V]; larger is more certain."""
    if scoring.score == "margin":
        best = probabilities.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]
    if scoring.score == "negative_entropy":
        return (probabilities * torch.log(probabilities + scoring.epsilon)).sum(dim=-1)
    return probabilities.gather(1, tokens[:, None])[:, 0]

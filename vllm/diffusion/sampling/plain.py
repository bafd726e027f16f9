# SPDX-License-Identifier: Apache-2.0
"""The rows of one request in PyTorch's arithmetic, at any precision and from any noise."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from vllm.diffusion import ops
from vllm.diffusion.sampling.categorical import draw_categorical
from vllm.diffusion.scoring import REMASKING, TOKEN

if TYPE_CHECKING:
    from vllm.diffusion.sampling.rows import NoiseSource, RowGroup


def sample_plain(
    logits: torch.Tensor, group: RowGroup, first_column: int, vocab_size: int, noise: NoiseSource
) -> ops.Sampled:
    """Token, score (larger is more certain) and greedy token of every row.

    Args:
        logits: [R, C] of this rank's columns; may be overwritten.
        group: whose rows they are.
        first_column: token id of the first column.
        vocab_size: columns of all ranks.
        noise: source of random numbers.
    """
    params, scoring = group.params, group.scoring
    if scoring.is_categorical:  # works on whole rows, so ranks exchange their columns
        logits, first_column = ops.gather_columns(logits, vocab_size), 0
    columns = range(first_column, first_column + logits.shape[1])
    for token in group.forbidden:
        if token in columns:
            logits[:, token - first_column] = -torch.inf
    dtype = group.confidence_dtype(logits)
    if scoring.is_categorical:
        tokens, scores = draw_categorical(logits.to(dtype), group, noise)
        is_drawn = scoring.greedy and params.temperature > 0
        return ops.Sampled(tokens, scores, logits.argmax(dim=-1) if is_drawn else tokens)
    whole_rows = logits.shape[1] == vocab_size
    most_likely = partial(
        ops.most_likely, logits, first_column=first_column, whole_rows=whole_rows, dtype=dtype
    )
    noisy, excluded = logits, group.excluded
    if params.temperature > 0:
        # argmax of exp(l) / (-log U)^t in the log domain; float64 as in the reference.
        u = noise.uniform(group.seed, TOKEN, group.step, group.positions, columns)
        noisy = logits.double() - params.temperature * torch.log(-torch.log(u))
    tokens, scores = most_likely(noisy, excluded=excluded)
    greedy = tokens
    if scoring.greedy and params.temperature > 0:
        greedy, _ = most_likely(logits, excluded=())
    if params.remasking == "random":
        u = noise.uniform(group.seed, REMASKING, group.step, group.positions, range(1))
        # Where entropies are compared, the number stands for the entropy.
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

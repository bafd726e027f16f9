# SPDX-License-Identifier: Apache-2.0
"""The most likely token straight from hidden states, with the logits stored only where it pays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gather_gemm import gather_top, is_top_faster
from vllm.diffusion.ops.linear import is_plain, linear, plain_weight
from vllm.diffusion.ops.sampling import most_likely
from vllm.distributed import tensor_model_parallel_all_gather

if TYPE_CHECKING:
    from torch import Tensor

    from gather_gemm import Top
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def most_likely_by_head(
    x: Tensor,
    layer: VocabParallelEmbedding,
    *,
    num_columns: int,
    first_column: int,
    whole_rows: bool,
    excluded: tuple[int, ...] = (),
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The token with the largest logit and its probability, without noise.

    Few rows go through one kernel, which keeps a tile of the logits at a time; of many the logits
    are stored and read again, which was measured faster.

    Args:
        x: [T, D] normed hidden states, model dtype.
        layer: the output head, without a bias.
        num_columns: columns of this rank, padding left out.
        first_column: token id of the first of them.
        whole_rows: the columns are those of all ranks.
        excluded: token ids whose probability is zero although they may be chosen.
        rows: int64 [R], the rows of x that are meant; None takes all.

    Returns:
        token [R] int64 (the lowest id among equals) and probability [R] fp32.
    """
    num_rows = len(x) if rows is None else len(rows)
    if is_plain(layer) and layer.bias is None and num_rows > 0:
        weight = plain_weight(layer)[:num_columns]
        if is_top_faster(x, num_rows, weight):
            last_column = first_column + num_columns
            local = [c - first_column for c in excluded if first_column <= c < last_column]
            top = gather_top(x, rows, weight, excluded=local)
            if whole_rows:
                return top.column + first_column, top.probability
            return _merged(top, first_column, excluded)
    logits = linear(x if rows is None else x.index_select(0, rows), layer)[:, :num_columns]
    return most_likely(
        logits,
        logits,
        first_column=first_column,
        whole_rows=whole_rows,
        excluded=excluded,
        dtype=torch.float32,
    )


def _merged(top: Top, first_column: int, excluded: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Token and probability over the columns of all ranks; three numbers per row cross them."""
    maximum, column = top.maximum.double(), (top.column + first_column).double()
    mine = torch.stack([maximum, column, top.sum_exp.double()], dim=-1)
    ranks = tensor_model_parallel_all_gather(mine, dim=-1).view(len(mine), -1, 3)
    best = ranks[:, :, 0].amax(dim=-1, keepdim=True)
    winner = ranks[:, :, 0].argmax(dim=-1, keepdim=True)  # first rank among equals: lowest id
    token = ranks[:, :, 1].gather(1, winner)[:, 0].long()
    total = (ranks[:, :, 2] * torch.exp(ranks[:, :, 0] - best).nan_to_num(0.0)).sum(dim=-1)
    is_excluded = torch.zeros_like(token, dtype=torch.bool)
    for token_id in excluded:
        is_excluded |= token == token_id
    return token, (1.0 / total).masked_fill(is_excluded | (best[:, 0] == -torch.inf), 0.0).float()

# SPDX-License-Identifier: Apache-2.0
"""Samples requests one by one: in PyTorch, with log probabilities, or with joint choices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.logprobs import Logprobs
from vllm.diffusion.core.samples import Samples
from vllm.diffusion.guided.joint import read_all
from vllm.diffusion.sampling.fused import launch_key, sample_fused
from vllm.diffusion.sampling.plain import sample_plain
from vllm.diffusion.sampling.traced import candidate_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.sampling.row_group import LogitsModel, RowGroup


def sample_group(logits: torch.Tensor, group: RowGroup, model: LogitsModel) -> ops.Sampled:
    """Return token, score (larger is more certain) and greedy token of every row of one group.

    The greedy token is the argmax of the noise-free logits if the scoring requires it, else the
    token. Ties go to the lowest token id.

    Args:
        logits: [R, columns of this rank]; may be overwritten.
        group: the request of these rows; guidance has been applied.
        model: the model, which defines the columns.
    """
    first_column = model.vocab_start
    # The function works on whole rows, so ranks exchange their columns.
    if group.adjust is not None:
        logits, first_column = ops.gather_columns(logits, model.vocab_size), 0
        logits = group.adjust(logits, group.positions)
        read_jointly(logits, [group], group.rows.start)
    key = launch_key(group, logits)
    if key is not None:
        return sample_fused(logits, [group], key, first_column, model.vocab_size)
    return sample_plain(logits, group, first_column, model.vocab_size)


def read_jointly(logits: torch.Tensor, groups: Sequence[RowGroup], first: int) -> None:
    """Pass whole rows of logits to the joint choices of requests.

    Args:
        logits: [R, V].
        groups: the requests of these rows; rows of other requests may be in between.
        first: index of the first of these rows in the hidden states.
    """
    samples = []
    for group in groups:
        start = group.rows.start - first
        for joint, rows in group.joints:
            at = slice(start + rows.start, start + rows.stop)
            samples.append((joint, at, group.positions[rows]))
    if samples:
        read_all(logits, samples)


def sample_alone(
    logits: torch.Tensor, group: RowGroup, model: LogitsModel
) -> Samples[torch.Tensor]:
    """Sample a group without a key; arguments as for `sample_group`, result as for `sample`."""
    if group.adjust is not None and group.scoring.adjusts_first:
        logits = group.adjust(ops.gather_columns(logits, model.vocab_size), group.positions)
        read_jointly(logits, [group], group.rows.start)
        group = replace(group, adjust=None)
    if not group.has_extras:
        return Samples.of(sample_group(logits, group, model))
    # Log probabilities come before the choice, which may overwrite the logits.
    if group.token_ids is not None:
        (token_ids,) = ops.to_device((group.token_ids,), logits.device)
        top = None
        # The best of all tokens are needed, so ranks exchange their columns.
        if group.num_top:
            whole = ops.gather_columns(logits, model.vocab_size)
            top = whole.topk(group.num_top, dim=-1).indices
            token_ids = torch.cat([token_ids, top], dim=1)
        scores = ops.token_logprobs(
            logits, token_ids, first_column=model.vocab_start, vocab_size=model.vocab_size
        )
        extras = [scores.T] if top is None else [scores.T, top.T]
        return Samples.of(sample_group(logits, group, model), extras)
    if not group.params.has_extras:
        return Samples.of(sample_group(logits, group, model))
    # A rank among all tokens needs all columns, so tensor-parallel ranks exchange them.
    whole = ops.gather_columns(logits, model.vocab_size)
    allowed_logits = _without(whole, group.forbidden)
    sampled = sample_group(logits, group, model)
    extras = []
    if group.params.num_logprobs is not None:
        extras.append(_logprobs(torch.log_softmax(allowed_logits, dim=-1), sampled, group).packed())
    if group.params.return_trajectory:
        extras.append(candidate_logprobs(allowed_logits, [group], sampled, 0, model.vocab_size))
    return Samples.of(sampled, extras)


def _logprobs(distribution: torch.Tensor, sampled: ops.Sampled, group: RowGroup) -> Logprobs:
    """Look up candidates, and the most likely or the named tokens, in log probabilities [R, V]."""
    named = None
    if group.params.logprob_token_ids:
        ids = np.array(group.params.logprob_token_ids, dtype=np.int64)
        (named,) = ops.to_device((ids,), distribution.device)
    num_top = group.params.num_logprobs or 0
    return Logprobs.of(distribution, sampled.token, sampled.greedy, num_top, named)


def _without(logits: torch.Tensor, forbidden: tuple[int, ...]) -> torch.Tensor:
    """Return a copy of whole rows of logits, [R, V] fp32, with -inf in `forbidden` columns."""
    copy = logits.to(torch.float32, copy=True)
    for token in forbidden:  # indexing with a list would make the host wait for the device
        copy[:, token] = -torch.inf
    return copy

# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of candidates of many requests, for trajectories: a few launches for all rows.

The choice itself knows the largest logit and the sum; until it hands them on, they are computed
once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.core.trajectory import CandidateLogprobs
from vllm.diffusion.sampling.row_group import pieces_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.sampling.row_group import LogitsModel, RowGroup


def candidate_logprobs(
    logits: torch.Tensor,
    groups: Sequence[RowGroup],
    found: ops.Sampled,
    model: LogitsModel,
    rows_at_a_time: int,
) -> torch.Tensor:
    """Return `CandidateLogprobs`, packed, of the rows of groups that all want trajectories.

    Args:
        logits: [R, C], the groups' rows one after another; this rank's columns, as the model and
            the requests' edits leave them.
        groups: the requests.
        found: what was sampled from the rows.
        model: the model whose columns they are.
        rows_at_a_time: rows of which copies are made.
    """
    whole = ops.gather_columns(logits, model.vocab_size)
    banned = _banned(groups, logits.device)
    has_entropy = groups[0].params.return_entropy
    packed = []
    for rows in pieces_of(len(whole), rows_at_a_time):
        kept = whole[rows].to(torch.float32, copy=bool(banned))
        for token, are_banned in banned.items():
            kept[:, token].masked_fill_(are_banned[rows], -torch.inf)
        packed.append(
            CandidateLogprobs.packed(
                kept, found.token[rows], found.greedy[rows], has_entropy=has_entropy
            )
        )
    return torch.cat(packed, dim=1)


def _banned(groups: Sequence[RowGroup], device: torch.device) -> dict[int, torch.Tensor]:
    """Return, by forbidden token, in which rows it is so, [R] bool."""
    tokens = sorted({token for group in groups for token in group.forbidden})
    if not tokens:
        return {}
    counts = [group.positions.numel() for group in groups]
    masks = tuple(
        np.array([token in group.forbidden for group in groups]).repeat(counts) for token in tokens
    )
    return dict(zip(tokens, ops.to_device(masks, device), strict=True))

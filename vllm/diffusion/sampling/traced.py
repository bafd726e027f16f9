# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of candidates of many requests, for trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.sampling.fused import bits_of, spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.sampling.row_group import RowGroup


def candidate_logprobs(
    logits: torch.Tensor,
    groups: Sequence[RowGroup],
    sampled: ops.Sampled,
    first_column: int,
    vocab_size: int,
) -> torch.Tensor:
    """Return the fields of `CandidateLogprobs`, [5, R] float64.

    Args:
        logits: [R, C], rows of the groups one after another; this rank's columns, after changes by
            the model and by the requests' edits.
        groups: the requests.
        sampled: samples of the rows.
        first_column: token id of the first column.
        vocab_size: number of columns of all ranks.
    """
    forbidden = [g.forbidden for g in groups]
    columns = tuple(sorted({token for tokens in forbidden for token in tokens}))
    masks: dict[str, Any] = {
        "forbidden": ([bits_of(tokens, columns) for tokens in forbidden], np.int32)
    }
    counts = [g.positions.numel() for g in groups]
    rows = ops.Rows(columns=columns, **spread(masks, counts, logits.device))
    tokens = torch.stack((sampled.token, sampled.greedy), dim=1)
    logprobs, entropies = ops.logprobs_and_entropies(
        logits, tokens, rows, first_column=first_column, vocab_size=vocab_size
    )
    named = torch.stack((tokens.double(), logprobs), dim=2).flatten(1)
    return torch.cat((named, entropies[:, None]), dim=1).T

# SPDX-License-Identifier: Apache-2.0
"""Answers with missing and additional tokens, from which a network learns to insert and delete.

A row that reads an additional token predicts the token that deletes. A row that reads the token
after missing ones predicts the token that inserts a mask before it. When the mask is filled, the
same row predicts the next insertion, or its own token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

    from tiny_model.family import TokenIds


class Moved(NamedTuple):
    """A part of an answer, all [N]."""

    ids: Tensor  # int64, tokens that the network reads
    wanted: Tensor  # int64, tokens that it predicts
    is_own: Tensor  # bool, whether it is a token of the answer, directly after the one before


def drawn_counts(is_answer: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Draw how often each token of a part [N] appears: not at all, once, or after another token.

    Args:
        is_answer: [N] bool, tokens that may be missing or have an additional token before them.
        share: share of these tokens that are one or the other.
        generator: source of the draw.
    """
    draw = torch.rand(is_answer.shape, generator=generator)
    is_missing = is_answer & (draw < share / 2)
    has_other = is_answer & (draw > 1 - share / 2)
    # An additional token after a missing one would be a wrong token.
    has_other[1:] &= ~is_missing[:-1]
    counts: Tensor = 1 + has_other.long() - is_missing.long()
    return counts


def moved(source: Tensor, others: Tensor, counts: Tensor, tokens: TokenIds) -> Moved:
    """Return tokens as often as they are counted.

    Args:
        source: [N] int64, tokens of an answer.
        others: [N] int64, the token to add before each token that is counted twice.
        counts: [N] int64, 0 to 2.
        tokens: ids of the tokens that delete and insert.
    """
    places = torch.arange(len(source)).repeat_interleave(counts)
    is_other = F.pad(places[1:] == places[:-1], (0, 1))
    follows_gap = F.pad(counts[:-1] == 0, (1, 0))[places] & ~is_other
    wanted = source[places].masked_fill(is_other, tokens.delete)
    wanted = wanted.masked_fill(follows_gap, tokens.split)
    ids = torch.where(is_other, others[places], source[places])
    return Moved(ids, wanted, ~(is_other | follows_gap))

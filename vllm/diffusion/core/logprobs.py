# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of candidates, as packed in the extras of `Samples`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Logprobs(NamedTuple):
    """Log probabilities and ranks of R candidates. Ranks count from 1; ties share the best rank.

    Attributes:
        token, token_rank: [R], of the proposed token.
        greedy, greedy_rank: [R], of the argmax of the noise-free logits.
        top_tokens: [k, R], the k most likely tokens, the most likely first, or the named tokens.
        top: [k, R], their log probabilities.
    """

    token: torch.Tensor
    token_rank: torch.Tensor
    greedy: torch.Tensor
    greedy_rank: torch.Tensor
    top_tokens: torch.Tensor
    top: torch.Tensor

    @classmethod
    def of(
        cls,
        distribution: torch.Tensor,
        tokens: torch.Tensor,
        greedy: torch.Tensor,
        num_top: int,
        named: torch.Tensor | None = None,
    ) -> Logprobs:
        """Look up candidates in log probabilities [R, V].

        Args:
            distribution: log probabilities of the rows.
            tokens, greedy: [R] int64.
            num_top: k.
            named: [k] int64, tokens to look up instead of the most likely ones.
        """
        if named is None:
            top, top_tokens = distribution.topk(num_top, dim=-1)
        else:
            top = distribution.index_select(1, named)
            top_tokens = named.expand_as(top)
        return cls(
            *_value_and_rank(distribution, tokens),
            *_value_and_rank(distribution, greedy),
            top_tokens.T,
            top.T,
        )

    def packed(self) -> torch.Tensor:
        """Pack into [4 + 2 k, R] float64, the extras of `Samples`."""
        return torch.cat([x.double().reshape(-1, self.token.numel()) for x in self])

    @classmethod
    def unpack(cls, rows: torch.Tensor, num_top: int) -> Logprobs:
        """Invert `packed` with views of `rows`; further rows are ignored."""
        token, token_rank, greedy, greedy_rank = rows[:4]
        top_tokens, top = rows[4 : 4 + 2 * num_top].chunk(2) if num_top else (rows[:0], rows[:0])
        return cls(token, token_rank, greedy, greedy_rank, top_tokens, top)


def _value_and_rank(
    distribution: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    values = distribution.gather(1, tokens[:, None])
    return values[:, 0], (distribution > values).sum(dim=-1) + 1

# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of candidates, for requests that ask for them.

They are those of the model's logits, after guidance and without the tokens that must not be
proposed, but before anything that an algorithm does to choose (noise, temperature, top-p, credit).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Logprobs(NamedTuple):
    """Log probabilities and ranks of R candidates. Ranks count from 1; ties share the best one.

    Attributes:
        token, token_rank: [R], of the proposed token.
        greedy, greedy_rank: [R], of the argmax of the noise-free logits.
        top_tokens: [k, R], the k most likely tokens, the likeliest first; or the named ones.
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
            named: [k] int64, tokens to look up in place of the most likely ones.
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
        """Pack into [4 + 2 k, R] float64, in which token ids are exact."""
        return torch.cat([x.double().reshape(-1, self.token.numel()) for x in self])

    @classmethod
    def unpack(cls, rows: torch.Tensor, num_top: int) -> Logprobs:
        """Invert `packed`; rows beyond its own are ignored."""
        token, token_rank, greedy, greedy_rank = rows[:4]
        top_tokens, top = rows[4 : 4 + 2 * num_top].chunk(2) if num_top else (rows[:0], rows[:0])
        return cls(token, token_rank, greedy, greedy_rank, top_tokens, top)


def distribution_of(logits: torch.Tensor, forbidden: tuple[int, ...]) -> torch.Tensor:
    """Return log probabilities [R, V] fp32 of whole rows of logits, without `forbidden` columns."""
    kept = logits.to(torch.float32, copy=True)
    for token in forbidden:  # a list as an index would make the host wait for the device
        kept[:, token] = -torch.inf
    return torch.log_softmax(kept, dim=-1)


def _value_and_rank(
    distribution: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    values = distribution.gather(1, tokens[:, None])
    return values[:, 0], (distribution > values).sum(dim=-1) + 1

# SPDX-License-Identifier: Apache-2.0
"""What sampling finds for the sample rows of a step, as the device computes and the host reads it.

R sample rows are the columns of one float64 tensor, so that one copy brings all of it to the host;
token ids are exact in float64:

    row 0      proposed token
    row 1      score, larger is more certain
    row 2      greedy token: argmax of the noise-free logits
    rows 3..   extras, where the row's request wants more: `Logprobs` or `ScoredTokens`; else 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


A = TypeVar("A")  # torch.Tensor on the device, an array on the host


@dataclass(frozen=True, eq=False)
class Samples(Generic[A]):
    """Candidates of R sample rows.

    Attributes:
        table: [3 or more, R] float64, a tensor or an array; the properties are views of it.
    """

    table: Any  # a matrix of what the properties are rows of

    @staticmethod
    def of(
        found: Iterable[torch.Tensor], extras: Sequence[torch.Tensor] = ()
    ) -> Samples[torch.Tensor]:
        """Pack token, score and greedy token, [R] each, and extras, [number, R] each."""
        table = torch.stack([x.double() for x in found])
        return Samples(torch.cat([table, *(x.double() for x in extras)]) if extras else table)

    @staticmethod
    def joined(parts: Sequence[Samples[torch.Tensor]]) -> Samples[torch.Tensor]:
        """Join the samples of parts, in order, as if all had been sampled at once."""
        if not parts:
            return Samples(torch.empty(3, 0, dtype=torch.float64))
        if len(parts) == 1:
            return parts[0]
        height = max(len(part.table) for part in parts)
        padded = [
            torch.nn.functional.pad(part.table, (0, 0, 0, missing)) if missing else part.table
            for part in parts
            for missing in [height - len(part.table)]
        ]
        return Samples(torch.cat(padded, dim=1))

    @property
    def tokens(self) -> A:
        return cast("A", self.table[0])

    @property
    def scores(self) -> A:
        return cast("A", self.table[1])

    @property
    def greedy(self) -> A:
        return cast("A", self.table[2])

    @property
    def extras(self) -> A:
        return cast("A", self.table[3:])


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
        """Pack into [4 + 2 k, R] float64, the extras of `Samples`."""
        return torch.cat([x.double().reshape(-1, self.token.numel()) for x in self])

    @classmethod
    def unpack(cls, rows: torch.Tensor, num_top: int) -> Logprobs:
        """Invert `packed` with views of `rows`; rows beyond its own are ignored."""
        token, token_rank, greedy, greedy_rank = rows[:4]
        top_tokens, top = rows[4 : 4 + 2 * num_top].chunk(2) if num_top else (rows[:0], rows[:0])
        return cls(token, token_rank, greedy, greedy_rank, top_tokens, top)


def _value_and_rank(
    distribution: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    values = distribution.gather(1, tokens[:, None])
    return values[:, 0], (distribution > values).sum(dim=-1) + 1

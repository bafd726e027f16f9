# SPDX-License-Identifier: Apache-2.0
"""Results of sampling the sample rows of a step, in the form shared by device and host.

The R sample rows are the columns of one float64 tensor, so that one copy moves all results to the
host. Token ids are exact in float64:

    row 0      proposed token
    row 1      score, larger is more certain
    row 2      greedy token: argmax of the noise-free logits
    rows 3..   extras that the row's request requires: `Logprobs` or `ScoredTokens`; or rows like
               the first three, drawn with the noise of later steps; else 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

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

    table: Any  # matrix whose rows are the properties

    @staticmethod
    def of(
        tables: Iterable[torch.Tensor], extras: Sequence[torch.Tensor] = ()
    ) -> Samples[torch.Tensor]:
        """Pack token, score and greedy token ([R] each) and extras ([number, R] each)."""
        table = torch.stack([x.double() for x in tables])
        return Samples(torch.cat([table, *(x.double() for x in extras)]) if extras else table)

    @staticmethod
    def joined(parts: Sequence[Samples[torch.Tensor]]) -> Samples[torch.Tensor]:
        """Join the samples of parts, in order, as if all rows had been sampled at once."""
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

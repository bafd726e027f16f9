# SPDX-License-Identifier: Apache-2.0
"""What a decoding rule is: it looks at the candidates of one forward and says which to commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from vllm.diffusion.params import DiffusionParams


class Candidates(NamedTuple):
    """Proposals for the masked positions of one sequence, in ascending order of position.

    Attributes:
        positions: [R] int64, positions in the sequence (prompt included).
        tokens: [R] int64, proposed token of each position.
        scores: [R] float64, larger is more certain.
    """

    positions: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor


def most_certain_first(scores: torch.Tensor) -> torch.Tensor:
    """Order of `scores` [R], descending, ties by ascending index; NaN counts as the least."""
    return torch.sort(torch.nan_to_num(scores, nan=-torch.inf), descending=True, stable=True)[1]


class DecodingRule(ABC):
    """One request's decoding, block after block.

    Before each forward the engine asks `window` which masked positions may be committed, and
    afterwards `select` which of their candidates are. A rule holds only its own progress: no
    tokens, no model. It always comes to an end, also with a model that predicts the mask token:
    positions that are still masked after the last block are filled in one more forward in which
    that token is forbidden.

    Args:
        params: the request's parameters.
        prompt_length: tokens before the canvas; blocks count from there.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        self.params = params
        self.prompt_length = prompt_length
        self.block = 0
        self.forbid_mask = False
        self._leftovers = False

    @property
    def block_start(self) -> int:
        return self.prompt_length + self.block * self.params.block_length

    @property
    def block_end(self) -> int:
        return self.block_start + self.params.block_length

    def window(self, masked: torch.Tensor) -> int | None:
        """Where the eligible positions of the next forward end; None when nothing is left to do.

        Args:
            masked: [T] bool, which positions of the sequence hold the mask token.
        """
        while self.block < self.params.num_blocks:
            if self.block_wants_forward(masked[self.block_start : self.block_end]):
                return self.block_end
            self.block += 1
        if not bool(masked.any()):
            return None
        self._leftovers = self.forbid_mask = True
        return masked.numel()

    def select(self, candidates: Candidates) -> torch.Tensor:
        """Indices [K] int64 into `candidates` that are committed after this forward."""
        if self._leftovers:
            return torch.arange(candidates.positions.numel())
        return self.select_in_block(candidates)

    @abstractmethod
    def block_wants_forward(self, masked: torch.Tensor) -> bool:
        """Whether the current block, whose masked positions are given ([block] bool), goes on."""

    @abstractmethod
    def select_in_block(self, candidates: Candidates) -> torch.Tensor:
        """`select` while blocks are left. Every masked position before `block_end` competes."""

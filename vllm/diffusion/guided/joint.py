# SPDX-License-Identifier: Apache-2.0
"""A request's joint choice in one forward: rows are read as their logits come, then it chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.diffusion import ops
from vllm.diffusion.guided.window import OPEN, Rows, choose, read
from vllm.diffusion.scoring import GUIDED, TOKEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.diffusion.guided.language import Language
    from vllm.diffusion.guided.window import Window
    from vllm.diffusion.ops import Array


@dataclass
class Joint:
    """What one forward of a request chooses together.

    Attributes:
        language: what its canvas must be in.
        window: the positions that are chosen for.
        temperature: 0 takes the best string, else one is drawn.
        seed, step: of the request's random numbers.
        is_tempered: confidences are taken at the temperature.
        sets_scores: the score of a candidate is the probability of its token; else it stays as
            sampling has it.
        excluded: token ids whose probability counts as zero.
        num_logprobs: most likely tokens that are told beside log probabilities, None for neither.
    """

    language: Language
    window: Window
    temperature: float
    seed: int
    step: int
    is_tempered: bool
    sets_scores: bool
    excluded: tuple[int, ...] = ()
    num_logprobs: int | None = None
    _read: list[Rows] = field(default_factory=list)

    def read(self, logits: torch.Tensor, positions: torch.Tensor) -> None:
        """Take in whole rows of logits [R, V] of canvas `positions` [R], in ascending order."""
        inside = positions >= 0  # masks of the prompt are filled freely
        logits, positions = logits[inside], positions[inside]
        gumbel = None
        if self.temperature > 0:
            columns = range(logits.shape[1])
            u = ops.philox_uniform(self.seed, TOKEN, self.step, positions, columns)
            gumbel = -torch.log(-torch.log(u)).numpy()
        own = logits.float().numpy()
        found = read(self.language, own, gumbel, self.temperature, is_tempered=self.is_tempered)
        self._read.append(found)

    def choose(self) -> tuple[Array, Array]:
        """Tokens [R] int64 and log probabilities [R] of the rows that were read."""
        rows = Rows(*(np.concatenate(parts) for parts in zip(*self._read, strict=True)))
        window, draws = self.window, None
        if self.temperature > 0:
            positions = torch.arange(window.first, window.first + len(window.kinds))
            drawn = ops.philox_uniform(self.seed, GUIDED, self.step, positions, range(1))
            draws = drawn[:, 0].numpy()
        chosen = choose(self.language, window, rows, draws)[:, None]
        tokens = np.take_along_axis(rows.tokens, chosen, axis=1)[:, 0]
        logprobs = np.take_along_axis(rows.logprobs, chosen, axis=1)[:, 0]
        return tokens, logprobs

    @property
    def num_rows(self) -> int:
        return int(np.count_nonzero(self.window.kinds == OPEN))


def choose_all(sampled: torch.Tensor, joints: Sequence[tuple[Joint, int]]) -> None:
    """Put what is jointly chosen in place of what was sampled row by row.

    Args:
        sampled: as `sample` returns it; changed.
        joints: requests with a choice, and the last of their columns + 1.
    """
    for joint, end in joints:
        columns = slice(end - joint.num_rows, end)
        tokens, logprobs = joint.choose()
        put(sampled, columns, torch.from_numpy(tokens), torch.from_numpy(logprobs), joint)


def put(
    sampled: Any, columns: slice, tokens: torch.Tensor, logprobs: torch.Tensor, joint: Joint
) -> None:
    """Write tokens [R] and their log probabilities [R] into `columns` of what was sampled."""
    sampled[0, columns] = tokens.double()
    sampled[2, columns] = tokens.double()
    if joint.num_logprobs is None:
        return
    # As `Logprobs.packed` has them; of the rank is known what the most likely tokens tell.
    top = slice(7 + joint.num_logprobs, 7 + 2 * joint.num_logprobs)
    ranks = 1 + (sampled[top, columns] > logprobs).sum(dim=0)
    for value, rank in ((3, 4), (5, 6)):
        sampled[value, columns] = logprobs.double()
        sampled[rank, columns] = ranks.double()
    if joint.sets_scores:
        scores = torch.exp(logprobs)
        for token in joint.excluded:
            scores = scores.masked_fill(tokens == token, 0.0)
        sampled[1, columns] = scores.double()

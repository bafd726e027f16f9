# SPDX-License-Identifier: Apache-2.0
"""How an answer came about: by step, which tokens were committed, and how probable they were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class CandidateLogprobs(NamedTuple):
    """Log probabilities of R candidates, as they stand in the extras of `Samples`.

    They are of the model's own distribution: after guidance and the request's edits, without
    forbidden tokens, before temperature and filters.

    Attributes:
        tokens, logprobs: [R], the proposed token and its log probability.
        greedy, greedy_logprobs: [R], the same of the argmax of the noise-free logits.
        entropies: [R], in nats.
    """

    tokens: Any
    logprobs: Any
    greedy: Any
    greedy_logprobs: Any
    entropies: Any

    @classmethod
    def unpack(cls, rows: Array) -> CandidateLogprobs:
        """Name the first rows of [5 or more, R]."""
        return cls(*rows[: len(cls._fields)])

    def of(self, tokens: Array) -> Array:
        """Return the log probabilities of `tokens` [R], NaN for those that were not proposed."""
        known: Array = self.logprobs.copy()
        known[tokens != self.tokens] = float("nan")
        is_greedy = tokens == self.greedy
        known[is_greedy] = self.greedy_logprobs[is_greedy]
        return known


class Commits(NamedTuple):
    """Commits of an answer in their order, K tokens; the mask token reopens a position.

    Attributes:
        steps: [K] int32, numbers of steps, from 1.
        positions: [K] int32, on the canvas; below 0 in the prompt.
        token_ids: [K] int32.
        logprobs: [K] fp32, NaN where there is none.
    """

    steps: Array
    positions: Array
    token_ids: Array
    logprobs: Array


@dataclass(frozen=True)
class Trajectory:
    """The N canvas positions of an answer up to the end of the last block begun.

    Attributes:
        prompt_length: tokens before the canvas.
        block_length: usual length of a block.
        block_starts: canvas positions at which blocks begin.
        token_ids: [N] int32; the mask token where nothing was committed.
        commit_steps: [N] int32: step that committed the token; 0: it stood there; -1: masked.
        block_steps: [N] int32: the same, counted from the block's first step.
        logprobs: [N] fp32, NaN where there is none.
        entropies: [N] fp32 of the commits' distributions; None where they are not wanted.
        filled: canvas positions that the rule filled.
        edits: all commits, where tokens were replaced; else None.
        prompt: commits of masks of the prompt; their positions count from its start.
        mask_forbidden: steps in which the mask token was forbidden.
        num_steps: steps of the answer.
        weight_steps: generations of weights, each with the first step that it computed.
    """

    prompt_length: int
    block_length: int
    block_starts: list[int]
    token_ids: Array
    commit_steps: Array
    block_steps: Array
    logprobs: Array
    entropies: Array | None
    filled: list[int]
    edits: Commits | None
    prompt: Commits
    mask_forbidden: list[int]
    num_steps: int
    weight_steps: list[tuple[int, int]]

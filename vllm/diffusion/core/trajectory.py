# SPDX-License-Identifier: Apache-2.0
"""The record of an answer's denoising: which tokens each step committed, and their probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class CandidateLogprobs(NamedTuple):
    """Log probabilities of R candidates, as packed in the extras of `Samples`.

    The distribution is the model's own: after guidance and the request's edits and without
    forbidden tokens, but before temperature and filters.

    Attributes:
        tokens, logprobs: [R], the proposed token and its log probability.
        greedy, greedy_logprobs: [R], the same for the argmax of the noise-free logits.
        entropies: [R], in nats.
    """

    tokens: Any
    logprobs: Any
    greedy: Any
    greedy_logprobs: Any
    entropies: Any

    @classmethod
    def unpack(cls, rows: Array) -> CandidateLogprobs:
        """Return the first rows of [5 or more, R] by name."""
        return cls(*rows[: len(cls._fields)])

    def of(self, tokens: Array) -> Array:
        """Return the log probabilities of `tokens` [R], NaN for tokens that were not proposed."""
        known: Array = self.logprobs.copy()
        known[tokens != self.tokens] = float("nan")
        is_greedy = tokens == self.greedy
        known[is_greedy] = self.greedy_logprobs[is_greedy]
        return known


class Commits(NamedTuple):
    """The K commits of an answer in order; a commit of the mask token reopens a position.

    Attributes:
        steps: [K] int32, numbers of steps, from 1.
        positions: [K] int32, on the canvas; negative in the prompt.
        token_ids: [K] int32.
        logprobs: [K] fp32, NaN if there is none.
    """

    steps: Array
    positions: Array
    token_ids: Array
    logprobs: Array


@dataclass(frozen=True)
class Trajectory:
    """The N canvas positions of an answer up to the end of the last block that was begun.

    Attributes:
        prompt_length: tokens before the canvas.
        block_length: usual length of a block.
        block_starts: canvas positions at which blocks begin.
        token_ids: [N] int32; the mask token if nothing was committed.
        commit_steps: [N] int32: step that committed the token; 0 if the token was given; -1 if the
            position is masked.
        block_steps: [N] int32: the same, counted from the block's first step.
        logprobs: [N] fp32, NaN if there is none.
        entropies: [N] fp32 of the commits' distributions; None if they were not requested.
        filled: canvas positions that the rule filled.
        edits: all commits, if tokens were replaced; else None.
        prompt: commits of masks in the prompt; their positions count from its start.
        mask_forbidden: steps in which the mask token was forbidden.
        num_steps: steps of the answer.
        weight_steps: versions of the weights, each with the first step that it computed.
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

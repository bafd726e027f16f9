# SPDX-License-Identifier: Apache-2.0
"""Interface of decoding rules, which choose positions of a forward and commit tokens."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy as np

from vllm.diffusion.core.scoring import CandidateScoring

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from vllm.diffusion.request.likelihood import TokenScores
    from vllm.diffusion.request.params import DiffusionParams

Array: TypeAlias = np.ndarray[Any, Any]
# Whether each of several items has a property.
Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


class ForwardTarget(NamedTuple):
    """Target of one forward: the positions that it must predict.

    Attributes:
        eligible: [R] int64, ascending: positions whose candidates are needed. They are masked,
            except that editing rules also list committed tokens of the active block.
        rows: first position and last + 1 that the forward is for. In full-attention families all
            other positions take part through their cached keys and values; without a cache, `rows`
            is the whole sequence. In block-causal families it is the active block of an absolute
            grid, and the engine adds earlier positions whose keys and values are not cached. An
            eligible position is in the block, or, if logits are shifted, the first position after
            it, whose candidate comes from the block's last row.
        fill: (position, token): before the forward, every position from there on is set to the
            token, or to an array of one token per position. The forward still returns candidates of
            `eligible` positions there.
        fill_end: position before which the fill ends; None for the end of the sequence.
        is_causal: in families with causal context: whether positions attend only to earlier
            positions, so that the row before a position predicts its candidate.
        tail_start: first position of the tail, the last rows of a window, which only draft, with
            an adapter of their own if there is one. None without a tail.
    """

    eligible: Array
    rows: tuple[int, int]
    fill: tuple[int, int | Array] | None = None
    fill_end: int | None = None
    is_causal: bool = False
    tail_start: int | None = None


class Candidates(NamedTuple):
    """Proposals for the eligible positions of one sequence, in ascending order of position.

    Attributes:
        positions: [R] int64, in the sequence (prompt included).
        tokens: [R] int64, the proposed tokens.
        scores: [R] float64, larger is more certain.
        greedy: [R] int64, argmax of the noise-free logits, if the rule's scoring requires it.
        draws: [R] float64 uniform numbers of (0, 1), if the rule sets `draw_purpose`.
        logprobs: [rows, R] float64, if the request needs log probabilities.
    """

    positions: Array
    tokens: Array
    scores: Array
    greedy: Array | None = None
    draws: Array | None = None
    logprobs: Array | None = None


class Commit(NamedTuple):
    """Tokens that become part of a sequence.

    Attributes:
        positions: [K] int64, in the sequence (prompt included).
        tokens: [K] int64; the mask token keeps its position masked, or masks it again.
    """

    positions: Array
    tokens: Array


class ScorePick(NamedTuple):
    """Commit of a rule that uses only scores: the most certain candidates.

    Only rules of block-causal families (`GridRule`) are chosen together in this way.

    Attributes:
        quota: minimum number to commit, if there are enough candidates.
        threshold: candidates with a larger score are all committed, if they are more than the
            quota.
        in_order: whether to commit the first candidates instead, regardless of their scores.
    """

    quota: int
    threshold: float = math.inf
    in_order: bool = False


def most_certain_first(scores: Array) -> Array:
    """Return the order of `scores` [R], descending, ties by ascending index; NaN comes last."""
    return (-scores).argsort(kind="stable")  # NumPy sorts NaN last


class DecodingRule(ABC):
    """Decoding rule of one request. It holds only its own progress: no tokens, no model.

    The engine calls `prepare` before each forward and `decide` after it. A rule ends with any
    model, even a model that predicts the mask token: while `forbid_mask` is set, that token is not
    proposed.

    Args:
        params: parameters of the request.
        prompt_length: number of tokens before the canvas; blocks are counted from there.
    """

    scoring: CandidateScoring = CandidateScoring()
    adjusts_logits: bool = False
    draw_purpose: int | None = None  # purpose of `Candidates.draws`
    # [R, k] int64, the tokens whose log probabilities are needed, per candidate.
    token_ids: Array | None = None
    # Result of a rule that computes likelihoods and commits nothing.
    scores: TokenScores | None = None
    # Lengths that the canvas takes after the latest choice, in order; empty if it keeps its length.
    new_lengths: tuple[int, ...] = ()
    report: Mapping[str, int] = MappingProxyType({})  # numbers that the answer's report has
    num_unconfirmed = 0  # positions of the answer that the rule may mask again
    first_step = 0  # step of the request at which the steps of its random numbers count from 0
    # Whether a random number depends on the position of its token, and not on the step.
    has_positional_noise = False
    # The blocks that have begun, half-open, for rules that choose their ends.
    block_bounds: tuple[tuple[int, int], ...] | None = None

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        self.params = params
        self.prompt_length = prompt_length
        self.forbid_mask = self.forbade_mask = False  # for the next forward, and for the last one
        # Comparing an array with a Python number takes twice the time.
        self._mask = np.array(params.mask_id)
        self._takes_all = False

    def noise_step(self, num_steps: int) -> int:
        """Return the number of a step in the random numbers that choose tokens."""
        return 0 if self.has_positional_noise else num_steps - self.first_step

    def fork(self) -> Self:
        """Return an independent copy, which may continue with other tokens.

        Rules with state on a device cannot be copied.
        """
        return copy.copy(self)

    def grow(self, params: DiffusionParams) -> Array:
        """Continue on a longer canvas; `params` are the parameters with its length.

        Called when the canvas is full, if the rule fills blocks from left to right, or after a
        choice that sets `new_lengths`.

        Returns:
            [T] int64, for each position of the longer sequence its previous position, or -1 for a
            new mask.
        """
        earlier = self.prompt_length + self.params.gen_length
        more = params.gen_length - self.params.gen_length
        self.params, self.new_lengths = params, ()
        self._takes_all = self.forbid_mask = False
        return np.pad(np.arange(earlier), (0, more), constant_values=-1)

    @abstractmethod
    def prepare(self, tokens: Array) -> ForwardTarget | None:
        """Return the target of the next forward; None if the rule has ended.

        Args:
            tokens: [T] int64, the sequence; read only. In block-causal families it ends with a
                block, so there may be further masked positions after the answer.
        """

    def num_settled(self, tokens: Array) -> int:
        """Return the number of positions, from 0, whose tokens never change again.

        May be called after a commit or before any commit. Later positions are not sent to the
        client, not searched for stop tokens, and not cached as final.

        Args:
            tokens: [T] int64, the sequence; read only.
        """
        masked = (tokens[self.prompt_length :] == self._mask).nonzero()[0]
        return self.prompt_length + int(masked[0]) if masked.size else len(tokens)

    def decided(self, tokens: Array) -> Array:
        """Return the sequence [T] without tokens that do not count yet, on which edits depend."""
        return tokens

    def decide(self, candidates: Candidates) -> Commit:
        """Return the tokens to commit after the forward, in the order of the rule's choice."""
        self.forbade_mask = self.forbid_mask
        chosen = self.select(candidates)
        return Commit(candidates.positions[chosen], self.replacement(candidates)[chosen])

    def select(self, candidates: Candidates) -> Array:
        """Return the indices [K] int64 of the candidates to commit after the forward."""
        if self._takes_all or candidates.positions.size == 0:
            return np.arange(candidates.positions.size)
        return self.choose(candidates)

    @abstractmethod
    def choose(self, candidates: Candidates) -> Array:
        """Choose for `select` by the algorithm; there is at least one candidate."""

    @property
    def pick(self) -> ScorePick | None:
        """The choice as data, so that `BatchedChoice` can replace `choose`; None if it cannot.

        Only for rules that commit tokens as they are proposed.
        """
        return None

    def next_target(self, tokens: Array, left: Array, has_changes: bool) -> ForwardTarget | None:
        """Advance the rule after a choice of `BatchedChoice` has been committed.

        Args:
            tokens: [T] int64, the sequence after the commit; read only.
            left: [L] int64, ascending: eligible positions that are still masked.
            has_changes: whether the commit contained tokens other than the mask token.

        Returns:
            the target that `prepare` would return, if tokens are settled up to its rows and nothing
            is to be filled; otherwise None, and the caller must call `prepare`.
        """
        raise NotImplementedError(f"{type(self).__name__} chooses by itself")

    def replacement(self, candidates: Candidates) -> Array:
        """Return the tokens [R] int64 to commit: by default the proposed tokens."""
        return candidates.tokens

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits to use instead of `logits`, in rules with `adjusts_logits`.

        `logits` may be overwritten if the scoring has `adjusts_first`.

        Called once per forward and eligible position, in chunks of rows.

        Args:
            logits: [R, V], all columns; may be overwritten.
            positions: [R] int64, from the start of the canvas.
        """
        raise NotImplementedError(f"{type(self).__name__} does not adjust logits")

    def fill_remaining(self, masked: Mask) -> ForwardTarget | None:
        """Begin a last forward that fills all of `masked` [T] bool, without the mask token."""
        if not masked.any():
            return None
        self._takes_all = self.forbid_mask = True
        return ForwardTarget(masked.nonzero()[0], (0, len(masked)))

    def forbid_mask_unless_changed(self, candidates: Candidates, chosen: Array) -> None:
        """Forbid the mask token in the next forward if this forward changes nothing."""
        tokens = self.replacement(candidates)[chosen].tolist()
        self.forbid_mask = {self.params.mask_id}.issuperset(tokens)


class BlockwiseRule(DecodingRule):
    """Base of rules that decode blocks from left to right; subclasses choose among masks.

    With `cache: prefix` or `dual` (Fast-dLLM, Wu et al., arXiv:2505.22618) only the first forward
    of a block computes the whole sequence. The others compute from the block's start to the end
    of the sequence (prefix) or the block alone (dual), and only the block's own positions compete.

    Positions that are still masked after the last block are filled in one more forward in which
    the mask token is forbidden.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        self.block = 0
        self._computed_block = -1  # the block whose first forward, on the whole sequence, has run

    @property
    def block_start(self) -> int:
        return self.prompt_length + self.block * self.params.block_length

    @property
    def block_end(self) -> int:
        return self.block_start + self.params.block_length

    def prepare(self, tokens: Array) -> ForwardTarget | None:
        masked = tokens == self._mask
        while self.block < self.params.num_blocks:
            if self.block_wants_forward(masked[self.block_start : self.block_end]):
                return self._work_in_block(masked)
            self.block += 1
        return self.fill_remaining(masked)

    def _work_in_block(self, masked: Mask) -> ForwardTarget:
        start, end, length = self.block_start, self.block_end, len(masked)
        if not self.params.computes_blocks or self._computed_block != self.block:
            self._computed_block = self.block
            return ForwardTarget(masked[:end].nonzero()[0], (0, length))
        eligible = masked[start:end].nonzero()[0] + start
        # The last block of a canvas that has grown to the model's maximum length may be shorter.
        window_end = length if self.params.cache == "prefix" else min(end, length)
        return ForwardTarget(eligible, (start, window_end))

    @abstractmethod
    def block_wants_forward(self, masked: Mask) -> bool:
        """Whether the current block needs another forward; `masked` is [block] bool."""

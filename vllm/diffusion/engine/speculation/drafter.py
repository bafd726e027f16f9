# SPDX-License-Identifier: Apache-2.0
"""Drafts of states that a sequence may reach, evaluated in the same step as the current state.

A state is a row of tokens and the rule that has prepared its forward. The candidates of one state
also rank what later states would commit. So a copy of the rule predicts the next states: it decides
among known candidates as if they came from the later state's own forward.

    current      a . . . .         depth 0: its forward is next
      |-- 1      a b . . .         depth 1: the best candidate is committed
      |   `- 1   a b . c .         depth 2
      `-- 2      a b . c .         depth 1: the two best are; another state than the one above
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from vllm.diffusion.decoding.base import Candidates, most_certain_first

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.diffusion.decoding.base import Array, DecodingRule, ForwardTarget
    from vllm.diffusion.engine.worker.canvas import Canvas

T = TypeVar("T")
# Chance of a draft whose parent is reached, by number of committed candidates and depth.
AcceptanceChance: TypeAlias = "Callable[[int | None, int], float]"

MAX_DRAFTED_COMMITS = 8  # maximum number of candidates of a draft that a rule may commit in a step
_COUNTS = range(1, MAX_DRAFTED_COMMITS + 1)
_UNSURE = -1e9  # score below every threshold, for confidences and for entropies


class DraftState(NamedTuple):
    """A state of a sequence.

    Attributes:
        depth: steps after the current state.
        tokens: [T] int64.
        rule: the rule, which has prepared the forward of the state.
        target: target of that forward.
        parent: the previous state; None if the draft does not follow from one.
        committed: number of candidates that the parent's rule was forced to commit; None if it
            decided itself.
    """

    depth: int
    tokens: Array
    rule: DecodingRule
    target: ForwardTarget
    parent: DraftState | None = None
    committed: int | None = None

    def is_of(self, tokens: Array, rule: DecodingRule, target: ForwardTarget) -> bool:
        """Whether a sequence whose next forward is for `target` is in this state."""
        expected = self.target
        return (
            self.rule.forbid_mask == rule.forbid_mask
            and (target.fill is None) == (expected.fill is None)
            and expected.rows == target.rows
            and np.array_equal(expected.eligible, target.eligible)
            and np.array_equal(self.tokens, tokens)
        )


class CandidateSource(Protocol):
    """Source of the candidates from which drafts are made."""

    def at(self, depth: int) -> Candidates | None:
        """Return the candidates for states at `depth`, with that step's random numbers."""
        ...


class Drafter:
    """Drafts the states that follow the current state.

    Args:
        is_chain: whether the rule's next commit, or its size, is known, so that each state has one
            child. Otherwise a state has one child for each number of candidates.
        crosses_blocks: whether a draft may fill a block and continue with the next block, all
            masks.
    """

    has_extra_draws = True
    rows_factor = 1  # rows of a draft relative to the request's next forward

    def __init__(self, *, is_chain: bool, crosses_blocks: bool) -> None:
        self._counts: Sequence[int | None] = (None,) if is_chain else _COUNTS
        self._crosses_blocks = crosses_blocks

    def can_draft(self, canvas: Canvas) -> bool:
        """Whether there may be drafts of a request's next states."""
        return True

    def draft(
        self,
        current: DraftState,
        source: CandidateSource,
        max_drafts: int,
        acceptance_chance: AcceptanceChance,
    ) -> list[DraftState]:
        """Return at most `max_drafts` different drafts, in descending order of chance."""
        drafts, seen = list[DraftState](), set[tuple[int, bytes]]()
        ranked = _DraftQueue[DraftState](self._counts, acceptance_chance)
        ranked.expect_children(current, 0, 1.0)
        while ranked and len(drafts) < max_drafts:
            draft_chance, parent, count = ranked.take()
            child = self._child(parent, source, count)
            if child is None:
                continue
            name = child.depth, child.target.eligible.tobytes()
            if name not in seen:
                seen.add(name)
                drafts.append(child)
                ranked.expect_children(child, child.depth, draft_chance)
        return drafts

    def chances(self, max_drafts: int, acceptance_chance: AcceptanceChance) -> list[float]:
        """Return the chances of the drafts that `draft` would try, in its order."""
        ranked, chances = _DraftQueue[int](self._counts, acceptance_chance), list[float]()
        ranked.expect_children(0, 0, 1.0)
        while len(chances) < max_drafts:
            draft_chance, depth, _ = ranked.take()
            chances.append(draft_chance)
            ranked.expect_children(depth + 1, depth + 1, draft_chance)
        return chances

    def _child(
        self, parent: DraftState, source: CandidateSource, count: int | None
    ) -> DraftState | None:
        """Return the state that follows if the rule commits the `count` best candidates.

        With `count` None, the rule decides by the scores. Returns None if there are no candidates
        for the next state, or if its forward is of another kind.
        """
        available = source.at(parent.depth + 1)
        if available is None or not available.positions.size:
            return None
        candidates = _among(available, parent.target.eligible)
        if not candidates.positions.size:
            return None
        if count is not None:
            candidates = candidates._replace(scores=_sure_of(count, candidates.scores))
        rule, tokens = parent.rule.fork(), parent.tokens.copy()
        commit = rule.decide(candidates)
        tokens[commit.positions] = commit.tokens
        target = rule.prepare(tokens)
        if target is None or target.fill is not None or not target.eligible.size:
            return None
        is_next_block = self._crosses_blocks and target.rows[0] == parent.target.rows[1]
        if target.rows != parent.target.rows and not is_next_block:
            return None
        return DraftState(parent.depth + 1, tokens, rule, target, parent, count)


class _DraftQueue(Generic[T]):
    """Queue of possible drafts, ordered by chance.

    Args:
        counts: numbers of candidates that a rule may commit; None if the rule decides.
        acceptance_chance: chance of a draft whose parent is reached.
    """

    def __init__(self, counts: Sequence[int | None], acceptance_chance: AcceptanceChance) -> None:
        self._counts, self._acceptance_chance = counts, acceptance_chance
        self._queue = list[tuple[float, int, T, int | None]]()
        self._number = 0

    def __bool__(self) -> bool:
        return bool(self._queue)

    def expect_children(self, parent: T, depth: int, chance: float) -> None:
        """Add the possible children of a state with this depth and chance."""
        for count in self._counts:
            self._number += 1  # children with equal chances keep their order
            child_chance = chance * self._acceptance_chance(count, depth + 1)
            heappush(self._queue, (-child_chance, self._number, parent, count))

    def take(self) -> tuple[float, T, int | None]:
        """Remove the likeliest draft: return its chance, its parent and its count."""
        chance, _, parent, count = heappop(self._queue)
        return -chance, parent, count


def _among(known: Candidates, positions: Array) -> Candidates:
    """Return the known candidates of `positions` [R], ascending."""
    places = known.positions.searchsorted(positions)
    places[places == known.positions.size] = 0
    places = places[known.positions[places] == positions]
    positions, tokens, scores = (x[places] for x in known[:3])
    greedy, draws = (None if x is None else x[places] for x in known[3:5])
    return Candidates(positions, tokens, scores, greedy, draws)


def _sure_of(count: int, scores: Array) -> Array:
    """Return scores with which a rule commits exactly the `count` best candidates.

    All other candidates keep their order, below every threshold.
    """
    order = most_certain_first(scores)
    sure = np.empty(scores.size)
    sure[order] = _UNSURE - np.arange(scores.size)
    sure[order[:count]] = 1.0
    return sure

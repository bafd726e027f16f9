# SPDX-License-Identifier: Apache-2.0
"""Guesses of the states that a sequence will reach: what one forward may evaluate beside the next.

A state is a row of tokens and the rule that has prepared its forward. The candidates of one state
also rank what comes later, so the rule itself says what follows, on a copy: a fork decides among
candidates that are known already, as if they were those of the state's own forward.

    certain      a . . . .         depth 0: its forward is next
      |-- 1      a b . . .         depth 1: the best candidate is committed
      |   `- 1   a b . c .         depth 2
      `-- 2      a b . c .         depth 1: the two best are; another state than the one above
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from vllm.diffusion.decoding.base import Candidates, most_certain_first

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, DecodingRule, ForwardTarget

MOST_TOGETHER = 8  # candidates of a guess that a rule may commit in a step
_UNSURE = -1e9  # score below every threshold, of confidences and of entropies


class State(NamedTuple):
    """A state of a sequence.

    Attributes:
        depth: steps after the certain state.
        tokens: [T] int64.
        rule: rule that has prepared the forward of the state.
        work: target of that forward.
    """

    depth: int
    tokens: Array
    rule: DecodingRule
    work: ForwardTarget


class Source(Protocol):
    """Candidates by which guesses are made."""

    ranks_exactly: bool  # scores are those of the step that they are for, whatever its logits

    def at(self, depth: int) -> Candidates | None:
        """Return candidates as the step that leads to states of `depth` would have them."""
        ...


class Drafter:
    """Guesses the states behind a certain one.

    Args:
        is_chain: the rule commits as many candidates as it would with other scores, so that one
            guess follows from another; else a state has one child for each number of them.
        crosses_blocks: a guess may be that a block is filled, and the next one all masks.
    """

    def __init__(self, *, is_chain: bool, crosses_blocks: bool) -> None:
        self._is_chain, self._crosses_blocks = is_chain, crosses_blocks

    def draft(self, certain: State, source: Source, most: int) -> list[State]:
        """Return at most `most` guesses, the likeliest first; each is another state."""
        counts = (None,) if self._is_chain or source.ranks_exactly else range(1, MOST_TOGETHER + 1)
        found, seen, number = list[State](), set[tuple[int, bytes]](), 0
        queue = list[tuple[float, int, State, int | None]]()

        def expect_children(parent: State, chance: float) -> None:
            nonlocal number
            for count in counts:
                number += 1
                heappush(queue, (-chance * 0.5 ** (count or 1), number, parent, count))

        expect_children(certain, 1.0)
        while queue and len(found) < most:
            chance, _, parent, count = heappop(queue)
            child = self._child(parent, source, count)
            if child is None:
                continue
            name = child.depth, child.work.eligible.tobytes()
            if name not in seen:
                seen.add(name)
                found.append(child)
                expect_children(child, -chance)
        return found

    def _child(self, parent: State, source: Source, count: int | None) -> State | None:
        """Return the state that follows where the rule commits the `count` best candidates.

        With None it decides by their scores. None is returned where nothing is known of what
        follows, or where its forward is of another kind.
        """
        known = source.at(parent.depth + 1)
        if known is None or not known.positions.size:
            return None
        candidates = _among(known, parent.work.eligible)
        if not candidates.positions.size:
            return None
        if count is not None:
            candidates = candidates._replace(scores=_sure_of(count, candidates.scores))
        rule, tokens = parent.rule.fork(), parent.tokens.copy()
        commit = rule.decide(candidates)
        tokens[commit.positions] = commit.tokens
        work = rule.prepare(tokens)
        if work is None or work.fill is not None or not work.eligible.size:
            return None
        is_next_block = self._crosses_blocks and work.rows[0] == parent.work.rows[1]
        if work.rows != parent.work.rows and not is_next_block:
            return None
        return State(parent.depth + 1, tokens, rule, work)


def _among(known: Candidates, positions: Array) -> Candidates:
    """Return the candidates of `positions` [R], ascending, as far as they are known."""
    places = known.positions.searchsorted(positions)
    places[places == known.positions.size] = 0
    places = places[known.positions[places] == positions]
    positions, tokens, scores = (x[places] for x in known[:3])
    greedy, draws = (None if x is None else x[places] for x in known[3:5])
    return Candidates(positions, tokens, scores, greedy, draws)


def _sure_of(count: int, scores: Array) -> Array:
    """Return scores by which a rule commits the `count` best candidates, and none for its own sake.

    The others keep their order.
    """
    order = most_certain_first(scores)
    sure = np.empty(scores.size)
    sure[order] = _UNSURE - np.arange(scores.size)
    sure[order[:count]] = 1.0
    return sure

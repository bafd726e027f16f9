# SPDX-License-Identifier: Apache-2.0
"""The fewest tokens of a text that must change before it is a string of a language."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm.diffusion.guided.open_window import FREE

if TYPE_CHECKING:
    from vllm.diffusion.guided.automaton import Array
    from vllm.diffusion.guided.language import Language

MAX_CELLS = 1 << 27  # tokens of a text times states of a language
_NEVER = np.iinfo(np.int32).max // 2


class NoStringError(ValueError):
    """No string of the language has all tokens that must stay.

    Attributes:
        position: the first position up to which no string has them.
    """

    def __init__(self, position: int) -> None:
        super().__init__(f"no string of the language has the tokens up to position {position}")
        self.position = position


def fewest_changes(language: Language, kinds: Array, can_change: Array, left: int) -> Array:
    """Return the positions, ascending, whose tokens must change, as few as possible.

    Every state that the language can reach has a cost after each position: the number of tokens
    that must change before it. Costs are computed forward, and the cheapest string is read
    backward.

    Args:
        kinds: [n] int32: the class of each token, or FREE for a mask, which may become any token.
        can_change: [n] bool: whether the token may change.
        left: number of positions after these within which the string must be complete.

    Raises:
        NoStringError: no string has the tokens that must not change.
    """
    edges = _OrderedEdges(language)
    costs = np.full((len(kinds) + 1, language.num_states), _NEVER, dtype=np.int32)
    costs[0, 0] = 0
    for at, kind in enumerate(kinds):
        costs[at + 1] = edges.reached(costs[at], edges.prices(kind, can_change[at]))
        if costs[at + 1].min() >= _NEVER:
            raise NoStringError(at)
    ends = np.where(language.room <= left, costs[-1], _NEVER)
    if ends.min() >= _NEVER:
        raise NoStringError(len(kinds) - 1)
    state, changed = int(ends.argmin()), list[int]()
    for at in range(len(kinds) - 1, -1, -1):
        prices = edges.prices(kinds[at], can_change[at])
        edge = edges.before(state, costs[at], prices)
        if prices[edge]:
            changed.append(at)
        state = int(edges.sources[edge])
    return np.array(changed[::-1], dtype=np.int64)


class _OrderedEdges:
    """The edges of a language, ordered by their targets."""

    def __init__(self, language: Language) -> None:
        edges = language.edges
        is_edge = edges.sets < language.num_sets
        sources = np.repeat(np.arange(language.num_states), edges.counts)[is_edge]
        sets, targets = edges.sets[is_edge], edges.targets[is_edge]
        order = np.argsort(targets, kind="stable")
        self.sources, self._sets, targets = sources[order], sets[order], targets[order]
        self._targets, self._starts = np.unique(targets, return_index=True)
        self._ends = np.append(self._starts[1:], len(targets))
        self._language = language

    def prices(self, kind: int, can_change: bool) -> Array:
        """Return what each edge costs at a token [E]: 0 if it keeps the token, 1 if not."""
        if kind == FREE:
            return np.zeros(len(self._sets), dtype=np.int32)
        keeps = np.isin(self._sets, self._language.sets_with(int(kind)))
        return np.where(keeps, 0, 1 if can_change else _NEVER).astype(np.int32)

    def reached(self, costs: Array, prices: Array) -> Array:
        """Return the costs [Q] after a position, from the costs before it and the edges' prices."""
        result = np.full(len(costs), _NEVER, dtype=np.int32)
        through = np.minimum(costs[self.sources] + prices, _NEVER)
        result[self._targets] = np.minimum.reduceat(through, self._starts)
        return result

    def before(self, state: int, costs: Array, prices: Array) -> int:
        """Return the cheapest edge to a state; among several, one that keeps the token."""
        place = int(np.searchsorted(self._targets, state))
        own = slice(self._starts[place], self._ends[place])
        through = 2 * (costs[self.sources[own]].astype(np.int64) + prices[own]) + (prices[own] > 0)
        return int(own.start + through.argmin())

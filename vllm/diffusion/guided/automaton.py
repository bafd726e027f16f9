# SPDX-License-Identifier: Apache-2.0
"""Compilation of an expression to the minimal deterministic automaton over bytes, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vllm.diffusion.guided.syntax import Byte, Either, Multiple, Repeat, Then, count_nodes

if TYPE_CHECKING:
    from vllm.diffusion.guided.syntax import Node

Array: TypeAlias = np.ndarray[Any, Any]

MOST_PARTS = 200_000  # of an expression with its repetitions written out
MOST_STATES = 16_000  # of the automaton; numbers of states have 16 bits


class TooLargeError(ValueError):
    """A language exceeds a limit; the message has the numbers."""


@dataclass(frozen=True)
class Automaton:
    """Automaton with states 0 to Q - 1, all reachable and leading to acceptance; 0 is initial.

    Attributes:
        table: [Q + 1, K] int32: the next state by class of bytes; Q is the dead state.
        classes: [256] int64: the class of every byte.
        accepting: [Q + 1] bool.
    """

    table: Array
    classes: Array
    accepting: Array

    @property
    def num_states(self) -> int:
        return len(self.table) - 1


def build(node: Node) -> Automaton:
    """Compile an expression to its automaton.

    Raises:
        TooLargeError: it has too many parts or states.
    """
    parts = count_nodes(node)
    if parts > MOST_PARTS:
        raise TooLargeError(f"it has {parts} parts; wanted at most {MOST_PARTS}")
    nfa = _Nfa()
    end = nfa.add(node, nfa.new())
    table, accepting, classes = _determine(nfa, end)
    table, accepting = _least(*_useful(table, accepting))
    return Automaton(table, classes, accepting)


class _Nfa:
    """Nondeterministic automaton with moves over bytes and over nothing; state 0 is initial."""

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.moves: list[list[tuple[int, int]]] = []  # (mask of bytes, state)

    def new(self) -> int:
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def add(self, node: Node, start: int) -> int:
        """Append `node` behind state `start`; return its end state, which no move leaves yet."""
        if isinstance(node, Byte):
            end = self.new()
            self.moves[start].append((node.mask, end))
            return end
        if isinstance(node, Then):
            for part in node.parts:
                start = self.add(part, start)
            return start
        if isinstance(node, Either):
            end = self.new()
            for option in node.options:
                first = self.new()
                self.free[start].append(first)
                self.free[self.add(option, first)].append(end)
            return end
        return self._repeat(node, start) if isinstance(node, Repeat) else self._sum(node, start)

    def _repeat(self, node: Repeat, start: int) -> int:
        for _ in range(node.least):
            start = self.add(node.node, start)
        end = self.new()
        if node.most is None:
            loop = self.new()
            self.free[start].append(loop)
            self.free[loop].append(end)
            self.free[self.add(node.node, loop)].append(loop)
            return end
        for _ in range(node.most - node.least):
            self.free[start].append(end)
            start = self.add(node.node, start)
        self.free[start].append(end)
        return end

    def _sum(self, node: Multiple, start: int) -> int:
        """Append the multiples of a factor, with one state for each remainder."""
        rests, end = [self.new() for _ in range(node.factor)], self.new()
        self.moves[start].append((1 << ord("0"), end))
        for digit in range(10):
            mask = 1 << (ord("0") + digit)
            if digit:
                self.moves[start].append((mask, rests[digit % node.factor]))
            for rest, state in enumerate(rests):
                self.moves[state].append((mask, rests[(10 * rest + digit) % node.factor]))
        self.free[rests[0]].append(end)
        return end


def _byte_classes(masks: set[int]) -> tuple[Array, dict[int, tuple[int, ...]]]:
    """Group bytes that all masks treat alike: [256] int64, and the classes of each mask."""
    ordered = sorted(masks)
    kinds: dict[tuple[int, ...], int] = {}
    found = np.empty(256, dtype=np.int64)
    for byte in range(256):
        key = tuple(index for index, mask in enumerate(ordered) if mask >> byte & 1)
        found[byte] = kinds.setdefault(key, len(kinds))
    classes: dict[int, list[int]] = {mask: [] for mask in ordered}
    for key, kind in kinds.items():
        for index in key:
            classes[ordered[index]].append(kind)
    return found, {mask: tuple(own) for mask, own in classes.items()}


def _determine(nfa: _Nfa, end: int) -> tuple[Array, Array, Array]:
    """Run the subset construction: table [Q + 1, K], accepting [Q + 1], classes of bytes [256]."""
    classes, of_mask = _byte_classes({mask for moves in nfa.moves for mask, _ in moves})
    closures: dict[int, frozenset[int]] = {}

    def closure(state: int) -> frozenset[int]:
        """Return the relevant states that `state` reaches over nothing."""
        if state not in closures:
            seen, waiting = {state}, [state]
            while waiting:
                new = [other for other in nfa.free[waiting.pop()] if other not in seen]
                seen.update(new)
                waiting += new
            closures[state] = frozenset(s for s in seen if nfa.moves[s] or s == end)
        return closures[state]

    subsets = [closure(0)]
    numbers = {subsets[0]: 0}
    rows: list[dict[int, int]] = []
    for subset in subsets:  # which grows meanwhile
        targets: dict[int, frozenset[int]] = {}
        for state in subset:
            for mask, target in nfa.moves[state]:
                reached = closure(target)
                for kind in of_mask[mask]:
                    targets[kind] = targets[kind] | reached if kind in targets else reached
        for reached in targets.values():
            if reached not in numbers:
                numbers[reached] = len(subsets)
                subsets.append(reached)
        if len(subsets) > MOST_STATES:
            raise TooLargeError(f"it has more than {MOST_STATES} states; wanted at most as many")
        rows.append({kind: numbers[reached] for kind, reached in targets.items()})
    table = np.full((len(rows) + 1, int(classes.max()) + 1), len(rows), dtype=np.int32)
    for number, row in enumerate(rows):
        table[number, list(row)] = list(row.values())
    return table, np.array([*(end in subset for subset in subsets), False]), classes


def _useful(table: Array, accepting: Array) -> tuple[Array, Array]:
    """Remove states from which nothing is accepted, except the first one."""
    alive, num_alive = accepting.copy(), -1
    while num_alive != int(alive.sum()):
        num_alive = int(alive.sum())
        alive |= alive[table].any(axis=1)
    alive[0] = True
    return _picked(table, accepting, alive.nonzero()[0], np.cumsum(alive) - 1, ~alive)


def _least(table: Array, accepting: Array) -> tuple[Array, Array]:
    """Merge equivalent states (Moore)."""
    weights = np.random.default_rng(0).integers(1, 2**63, table.shape[1] + 1, dtype=np.uint64)
    group: Array = accepting.astype(np.uint64)
    num_groups = 0
    while True:
        keys = group * weights[-1] + (group[table] * weights[:-1]).sum(axis=1, dtype=np.uint64)
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        if len(first) == num_groups:
            break
        num_groups, group = len(first), group.astype(np.uint64)
    dead = group == group[-1]
    order = np.sort(first[~dead[first]])
    order = order if len(order) and order[0] == 0 else np.array([0, *order])
    numbers = np.zeros(int(group.max()) + 1, dtype=np.int64)
    numbers[group[order]] = np.arange(len(order))
    return _picked(table, accepting, order, numbers[group], dead)


def _picked(
    table: Array, accepting: Array, kept: Array, numbers: Array, dead: Array
) -> tuple[Array, Array]:
    """Keep the states `kept`; every state [Q + 1] has its new number, or is dead."""
    new = np.where(dead, len(kept), numbers)
    new[-1] = len(kept)
    rows = [*kept, len(table) - 1]
    return new[table[rows]].astype(np.int32), accepting[rows]

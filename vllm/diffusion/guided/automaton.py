# SPDX-License-Identifier: Apache-2.0
"""Compilation of an expression to the minimal deterministic automaton over bytes, as arrays."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from vllm.diffusion.guided.allowance import Allowance, TooLargeError
from vllm.diffusion.guided.syntax import (
    Byte,
    Either,
    Multiple,
    Repeat,
    Then,
    count_nodes,
    largest_repeat,
)

if TYPE_CHECKING:
    from vllm.diffusion.guided.syntax import Node

Array: TypeAlias = np.ndarray[Any, Any]

MAX_PARTS = 200_000  # parts of an expression with its repetitions expanded
MAX_STATES = 20_000  # states of the automaton, over bytes or over tokens
_MAX_SUBSETS = 3 * MAX_STATES  # subsets before equivalent states are merged
_NOWHERE = -1  # unknown target in a row that is not complete yet
_MANY_SETS = 256  # number of sets above which they are joined in one call
_UNCOUNTED_WORK = 1 << 16  # operations between two calls of `spend`


@dataclass(frozen=True)
class Automaton:
    """Automaton with states 0 to Q - 1, all reachable and able to reach acceptance; 0 is initial.

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

    def accepts(self, data: bytes) -> bool:
        """Return whether bytes are in the language; takes time linear in their number."""
        state, table, classes = 0, memoryview(self.table.data), self.classes.tolist()
        for byte in data:
            state = table[state, classes[byte]]
        return bool(self.accepting[state])


def build(node: Node, allowance: Allowance | None = None) -> Automaton:
    """Compile an expression to its automaton.

    Raises:
        TooLargeError: it has too many parts or states; the message names its largest repetition.
    """
    try:
        return _built(node, allowance or Allowance())
    except TooLargeError as error:
        origin = largest_repeat(node)
        raise type(error)(f"{origin}: {error}" if origin else str(error)) from None


def _built(node: Node, allowance: Allowance) -> Automaton:
    parts = count_nodes(node)
    if parts > MAX_PARTS:
        raise TooLargeError(f"it has {parts} parts; wanted at most {MAX_PARTS}")
    allowance.spend(parts)
    nfa = _Nfa()
    end = nfa.add(node, nfa.new())
    table, accepting, classes = _determine(nfa, end, allowance)
    table, accepting = _least(*_useful(table, accepting), allowance)
    if len(table) > MAX_STATES:
        raise TooLargeError(f"it has {len(table)} states; wanted at most {MAX_STATES}")
    return Automaton(table, classes, accepting)


class _Nfa:
    """Nondeterministic automaton with moves over bytes and empty moves; state 0 is initial."""

    def __init__(self) -> None:
        self.free: list[list[int]] = []
        self.moves: list[list[tuple[int, int]]] = []  # (mask of bytes, state)

    def new(self) -> int:
        self.free.append([])
        self.moves.append([])
        return len(self.free) - 1

    def add(self, node: Node, start: int) -> int:
        """Append `node` after state `start`; return its end state, which has no moves yet."""
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
        for _ in range(node.minimum):
            start = self.add(node.node, start)
        end = self.new()
        if node.maximum is None:
            loop = self.new()
            self.free[start].append(loop)
            self.free[loop].append(end)
            self.free[self.add(node.node, loop)].append(loop)
            return end
        for _ in range(node.maximum - node.minimum):
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
    """Group bytes that all masks treat equally: [256] int64, and the classes of each mask."""
    ordered = sorted(masks)
    kinds: dict[tuple[int, ...], int] = {}
    numbers = np.empty(256, dtype=np.int64)
    for byte in range(256):
        key = tuple(index for index, mask in enumerate(ordered) if mask >> byte & 1)
        numbers[byte] = kinds.setdefault(key, len(kinds))
    classes: dict[int, list[int]] = {mask: [] for mask in ordered}
    for key, kind in kinds.items():
        for index in key:
            classes[ordered[index]].append(kind)
    return numbers, {mask: tuple(numbers_of_mask) for mask, numbers_of_mask in classes.items()}


def _determine(nfa: _Nfa, end: int, allowance: Allowance) -> tuple[Array, Array, Array]:
    """Run the subset construction: table [Q + 1, K], accepting [Q + 1], classes of bytes [256]."""
    classes, of_mask = _byte_classes({mask for moves in nfa.moves for mask, _ in moves})
    num_kinds = int(classes.max()) + 1
    closures = _Closures(nfa, end, allowance)
    subsets = [closures.of(0)]
    numbers = {subsets[0]: 0}
    rows: list[Array] = []
    # The list grows during the loop.
    for subset in subsets:
        targets = _targets(subset, nfa, closures, of_mask, allowance)
        for reached in targets.values():
            if reached not in numbers:
                numbers[reached] = len(subsets)
                subsets.append(reached)
        if len(subsets) > _MAX_SUBSETS:
            raise TooLargeError(f"it has more than {MAX_STATES} states; wanted at most as many")
        row = np.full(num_kinds, _NOWHERE, dtype=np.int32)
        row[list(targets)] = [numbers[reached] for reached in targets.values()]
        rows.append(row)
    table = np.stack([*rows, np.full(num_kinds, _NOWHERE, dtype=np.int32)])
    table[table == _NOWHERE] = len(rows)
    return table, np.array([*(end in subset for subset in subsets), False]), classes


def _targets(
    subset: frozenset[int],
    nfa: _Nfa,
    closures: _Closures,
    of_mask: dict[int, tuple[int, ...]],
    allowance: Allowance,
) -> dict[int, frozenset[int]]:
    """Return the subset that each class of bytes leads to from `subset`."""
    parts: dict[int, list[frozenset[int]]] = {}
    work = 1
    for state in subset:
        for mask, target in nfa.moves[state]:
            reached = closures.of(target)
            for kind in of_mask[mask]:
                parts.setdefault(kind, []).append(reached)
            work += len(of_mask[mask]) * (1 + len(reached) // 4)
        if work > _UNCOUNTED_WORK:
            allowance.spend(work)
            work = 0
    allowance.spend(work)
    return {kind: _union(targets) for kind, targets in parts.items()}


def _union(sets: list[frozenset[int]]) -> frozenset[int]:
    """Return the union of sets; many sets are joined in one call.

    The iteration order of a set depends on how it was made, states are numbered in that order, and
    draws depend on these numbers. So the two branches must not be exchanged.
    """
    if len(sets) > _MANY_SETS:
        return sets[0].union(*sets[1:])
    return functools.reduce(operator.or_, sets)


class _Closures:
    """The relevant states that each state reaches over empty moves."""

    def __init__(self, nfa: _Nfa, end: int, allowance: Allowance) -> None:
        self._nfa, self._end, self._allowance = nfa, end, allowance
        self._known: dict[int, frozenset[int]] = {}

    def of(self, state: int) -> frozenset[int]:
        closure = self._known.get(state)
        if closure is not None:
            return closure
        free, moves = self._nfa.free, self._nfa.moves
        seen, waiting = {state}, [state]
        while waiting:
            for other in free[waiting.pop()]:
                if other not in seen:
                    seen.add(other)
                    if free[other]:
                        waiting.append(other)
        self._allowance.spend(len(seen))
        closure = frozenset([s for s in seen if moves[s] or s == self._end])
        self._known[state] = closure
        return closure


def _useful(table: Array, accepting: Array) -> tuple[Array, Array]:
    """Remove states that cannot reach acceptance, except the first state."""
    alive = accepting.copy()
    sources, starts = _predecessors(table)
    waiting: list[int] = accepting.nonzero()[0].tolist()
    while waiting:
        state = waiting.pop()
        new = sources[starts[state] : starts[state + 1]]
        new = new[~alive[new]]
        alive[new] = True
        waiting += dict.fromkeys(new.tolist())
    alive[0] = True
    return _picked(table, accepting, alive.nonzero()[0], np.cumsum(alive) - 1, ~alive)


def _predecessors(table: Array) -> tuple[Array, Array]:
    """Return the predecessors of all states, and the start of each state's predecessors [Q + 1]."""
    dead = len(table) - 1
    states, kinds = (table != dead).nonzero()
    targets = table[states, kinds]
    order = np.argsort(targets, kind="stable")
    return states[order], np.searchsorted(targets[order], np.arange(dead + 1))


def _least(table: Array, accepting: Array, allowance: Allowance) -> tuple[Array, Array]:
    """Merge equivalent states."""
    group = _groups(table, accepting, allowance)
    _, first, group = np.unique(group, return_index=True, return_inverse=True)
    dead = group == group[-1]
    order = np.sort(first[~dead[first]])
    numbers = np.zeros(int(group.max()) + 1, dtype=np.int64)
    numbers[group[order]] = np.arange(len(order))
    return _picked(table, accepting, order, numbers[group], dead)


def _groups(table: Array, accepting: Array, allowance: Allowance) -> Array:
    """Return the number of every state's class of equivalent states, [Q + 1] int32.

    Classes are split by the classes of their states' targets until nothing changes. Each round
    looks only at states with a target whose class has changed, and the largest part of a class
    keeps its number. So a long chain, which splits off one state per round, costs no more than
    other automata.
    """
    group = accepting.astype(np.int32)
    # `_useful` has removed all other dead states.
    group[-1] = 2
    sizes = np.bincount(group, minlength=3).tolist()
    sources, starts = _predecessors(table)
    looked_at = np.arange(len(table) - 1)
    while len(looked_at):
        allowance.spend(len(looked_at) * (2 + table.shape[1] // 16) + 40)
        parts = _parts(group, table, looked_at)
        changed = [
            part
            for number, members in parts.items()
            for part in _moved(group, sizes, number, members)
        ]
        for part in changed:
            group[part] = len(sizes)
            sizes.append(len(part))
        moved = [state for part in changed for state in part]
        before = [sources[starts[state] : starts[state + 1]] for state in moved]
        looked_at = np.unique(np.concatenate(before)) if before else looked_at[:0]
    return group


def _parts(group: Array, table: Array, looked_at: Array) -> dict[int, list[list[int]]]:
    """Group states by class, and the states of a class by the classes of their targets."""
    parts: dict[int, dict[bytes, list[int]]] = {}
    numbers, targets = group[looked_at].tolist(), group[table[looked_at]]
    for state, number, row in zip(looked_at.tolist(), numbers, targets, strict=True):
        parts.setdefault(number, {}).setdefault(row.tobytes(), []).append(state)
    return {number: list(members.values()) for number, members in parts.items()}


def _moved(group: Array, sizes: list[int], number: int, parts: list[list[int]]) -> list[list[int]]:
    """Return the parts of a class that get new numbers, which are all but the largest part.

    States of the class that are in none of `parts` have unchanged targets and form another part.
    """
    num_others = sizes[number] - sum(map(len, parts))
    ordered = sorted(parts, key=len)
    if num_others and num_others < len(ordered[-1]):
        others = np.setdiff1d((group == number).nonzero()[0], np.concatenate(parts))
        ordered.insert(0, others.tolist())
    if num_others < len(ordered[-1]):
        ordered.pop()
    sizes[number] -= sum(map(len, ordered))
    return ordered


def _picked(
    table: Array, accepting: Array, kept: Array, numbers: Array, dead: Array
) -> tuple[Array, Array]:
    """Return table and acceptance of the states `kept`, renumbered.

    Args:
        table, accepting: the automaton.
        kept: the states to keep, in their new order.
        numbers: [Q + 1] new number of every state.
        dead: [Q + 1] whether a state becomes the dead state.
    """
    new = np.where(dead, len(kept), numbers)
    new[-1] = len(kept)
    rows = [*kept, len(table) - 1]
    return new[table[rows]].astype(np.int32), accepting[rows]

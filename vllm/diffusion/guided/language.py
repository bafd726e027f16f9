# SPDX-License-Identifier: Apache-2.0
"""Language over tokens: which token leads from which state to which.

Tokens with equal effect in every state form one class. The classes that lead from one state to
another form a set; there are few distinct sets, so the transitions of a state are a short list of
(set, state).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from vllm.diffusion.guided.automaton import TooLargeError

if TYPE_CHECKING:
    from vllm.diffusion.guided.automaton import Array, Automaton
    from vllm.diffusion.guided.vocabulary import Vocabulary

MOST_STATES = 4_000  # that tokens lead to
MOST_CELLS = 64_000_000  # states times classes
DEAD = -1  # the class of tokens that lead nowhere
_LEAST_WIDTH, _MOST_WIDTH = 8, 128  # of a segment, in tokens
_NEVER = 2**30  # tokens to acceptance, where it cannot be reached


class EmptyLanguageError(ValueError):
    """No sequence of tokens is in the language."""


class Ends(NamedTuple):
    """Token ids that end an answer.

    Attributes:
        eos: token that fills the canvas behind the answer.
        others: tokens that may stand right behind it.
    """

    eos: int
    others: tuple[int, ...] = ()


class Segments(NamedTuple):
    """All tokens, class by class, cut into about a thousand rows and one more for every class.

    Attributes:
        tokens: [G, W] int32: tokens of one class a row, ascending; -1 behind the last one.
        starts: [C + 2] int32: first row of each class, then of tokens that lead nowhere, then G.
    """

    tokens: Array
    starts: Array


@dataclass(frozen=True)
class Language:
    """Automaton over tokens with states 0 to Q - 1: 0 is initial, Q - 1 is behind the answer's end.

    Attributes:
        class_of_token: [V] int16; the largest classes have the lowest numbers.
        set_starts: [S + 1] int32: start of every set's classes in `set_members`.
        set_members: [M] int16.
        edge_sets: [Q, K] int32: sets that the state allows; S for none.
        edge_targets: [Q, K] int32: states that these lead to.
        room: [Q] int32: least number of tokens to a whole answer; 0 where it is whole.
    """

    class_of_token: Array
    set_starts: Array
    set_members: Array
    edge_sets: Array
    edge_targets: Array
    room: Array

    @property
    def num_states(self) -> int:
        return len(self.room)

    @property
    def num_sets(self) -> int:
        return len(self.set_starts) - 1

    @cached_property
    def num_classes(self) -> int:
        return int(self.class_of_token.max()) + 1

    @property
    def least_tokens(self) -> int:
        """Number of tokens of the shortest answer."""
        return int(self.room[0])

    @cached_property
    def segments(self) -> Segments:
        """Order in which rows of logits are read."""
        own = np.where(self.class_of_token < 0, self.num_classes, self.class_of_token)
        order = np.argsort(own, kind="stable")
        sizes = np.bincount(own, minlength=self.num_classes + 1)
        width = min(max(1 << (len(own) // 1024).bit_length(), _LEAST_WIDTH), _MOST_WIDTH)
        starts = np.cumsum([0, *(-(-sizes // width))])
        behind = np.arange(len(own)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tokens = np.full((starts[-1], width), -1, dtype=np.int32)
        tokens[np.repeat(starts[:-1], sizes) + behind // width, behind % width] = order
        return Segments(tokens, starts.astype(np.int32))

    @cached_property
    def next_state(self) -> Array:
        """Next states [Q + 1, C + 1] int32 by class, Q for none; the last class is DEAD."""
        shape = (self.num_states + 1, self.num_classes + 1)
        table = np.full(shape, self.num_states, dtype=np.int32)
        starts = self.set_starts.tolist()
        for state, place in zip(*(self.edge_sets < self.num_sets).nonzero(), strict=True):
            number = int(self.edge_sets[state, place])
            members = self.set_members[starts[number] : starts[number + 1]]
            table[state, members] = self.edge_targets[state, place]
        return table

    def advance(self, state: int, token: int) -> int:
        """Return the state behind a token; `num_states` where the token is not allowed."""
        return int(self.next_state[state, self.class_of_token[token]])

    def is_closed(self, state: int) -> bool:
        """Whether an answer that led to `state` is whole and cannot be continued."""
        if state == self.num_states or self.room[state] > 0:
            return False
        alive = self.edge_sets[state] < self.num_sets
        return bool((self.edge_targets[state, alive] == self.num_states - 1).all())

    def packed(self) -> bytes:
        """Pack the language into bytes, for `unpacked`."""
        parts = [(a.dtype.str, a.shape, a.tobytes()) for a in (getattr(self, n) for n in _NAMES)]
        return zlib.compress(msgspec.msgpack.encode(parts), 1)

    @classmethod
    def unpacked(cls, data: bytes) -> Language:
        parts = msgspec.msgpack.decode(zlib.decompress(data))
        return cls(*(np.frombuffer(raw, dtype).reshape(shape) for dtype, shape, raw in parts))


_NAMES = tuple(field.name for field in fields(Language))


def over_tokens(automaton: Automaton, vocabulary: Vocabulary, ends: Ends) -> Language:
    """Make the language of an automaton, over tokens, with what may follow an answer.

    Raises:
        TooLargeError: with the numbers.
        EmptyLanguageError: no tokens spell any of it.
    """
    class_of_token, targets = _walk(automaton, vocabulary)
    targets, room = _useful_states(targets, automaton.accepting[:-1])
    class_of_token, targets = _by_size(class_of_token, targets)
    num_states, num_classes = targets.shape[0], targets.shape[1]
    class_of_token[list(ends.others)] = num_classes + 1
    class_of_token[ends.eos] = num_classes
    eos, other = [num_classes], [num_classes + 1] if ends.others else []
    return _with_edges(class_of_token, targets, room, num_states, eos, other)


def _walk(automaton: Automaton, vocabulary: Vocabulary) -> tuple[Array, Array]:
    """Return the classes of tokens [V] int64, and their targets from every state: [Q, C] int32.

    Q stands for no state.

    The trie is walked from all states at once. Paths with equal effect are merged: a `vector` holds
    the state that each state is led to.
    """
    table, num_states = automaton.table, automaton.num_states
    num_kinds = table.shape[1]
    vectors = _Vectors(num_states)
    nodes = np.array([vectors.number(np.arange(num_states + 1, dtype=np.int32)[None])[0]])
    class_of_token = np.full(vocabulary.num_columns, DEAD, dtype=np.int64)
    for level in vocabulary.levels:
        before = nodes[level.parents]
        alive = (before != 0).nonzero()[0]
        nodes = np.zeros(len(before), dtype=np.int64)
        keys = before[alive] * num_kinds + automaton.classes[level.bytes[alive]]
        found, place = np.unique(keys, return_inverse=True)
        steps = table[vectors.rows(found // num_kinds), (found % num_kinds)[:, None]]
        nodes[alive] = vectors.number(steps)[place]
        class_of_token[level.end_tokens] = nodes[level.end_nodes]
    used, own = np.unique(class_of_token, return_inverse=True)
    names = used[used > 0]
    if not len(names):
        raise EmptyLanguageError("no tokens of the model spell it")
    class_of_token = own - np.count_nonzero(used <= 0)
    return np.maximum(class_of_token, DEAD), vectors.rows(names)[:, :-1].T


class _Vectors:
    """Distinct rows of states, numbered; number 0 leads nowhere from anywhere."""

    def __init__(self, num_states: int) -> None:
        random = np.random.default_rng(0)
        self._weights = random.integers(1, 2**63, num_states + 1, dtype=np.uint64)
        self._known: dict[int, int] = {}
        self._parts: list[Array] = []
        self._rows = np.empty((0, num_states + 1), dtype=np.int32)
        self.number(np.full((1, num_states + 1), num_states, dtype=np.int32))

    def number(self, rows: Array) -> Array:
        """Return the numbers [N] int64 of rows [N, Q + 1], adding new ones."""
        keys = (rows.astype(np.uint64) * self._weights).sum(axis=1, dtype=np.uint64)
        numbers, new = np.empty(len(rows), dtype=np.int64), []
        for index, key in enumerate(keys.tolist()):
            if key not in self._known:
                self._known[key] = len(self._known)
                new.append(index)
            numbers[index] = self._known[key]
        if len(self._known) * rows.shape[1] > MOST_CELLS:
            raise TooLargeError(
                f"its {rows.shape[1] - 1} states tell more than {MOST_CELLS // rows.shape[1]} "
                f"kinds of token apart; wanted at most {MOST_CELLS} of both together"
            )
        self._rows = np.concatenate([self._rows, rows[new]])
        return numbers

    def rows(self, numbers: Array) -> Array:
        return self._rows[numbers]


def _useful_states(targets: Array, accepting: Array) -> tuple[Array, Array]:
    """Keep states that whole tokens lead to and from which they lead to acceptance.

    Returns:
        targets [Q', C] int32, and the least number of tokens to acceptance [Q'] int32.
    """
    num_states = len(targets)
    leads = np.zeros((num_states, num_states + 1), dtype=np.bool_)
    leads[np.arange(num_states)[:, None], targets] = True
    leads = leads[:, :-1]
    reached = _distances(leads, np.arange(num_states) == 0) < _NEVER
    room = _distances(leads.T, accepting)
    if room[0] == _NEVER:
        raise EmptyLanguageError("no tokens of the model spell it")
    kept = (reached & (room < _NEVER)).nonzero()[0]
    if len(kept) >= MOST_STATES:
        raise TooLargeError(f"it has {len(kept)} states; wanted at most {MOST_STATES}")
    numbers = np.full(num_states + 1, len(kept), dtype=np.int32)
    numbers[kept] = np.arange(len(kept))
    return numbers[targets[kept]], room[kept].astype(np.int32)


def _distances(leads: Array, first: Array) -> Array:
    """Count the steps from `first` [Q] bool to every state; `leads` [Q, Q] bool, row to column."""
    found = np.where(first, 0, _NEVER)
    newest, steps = first, 0
    while newest.any():
        steps += 1
        newest = leads[newest].any(axis=0) & (found == _NEVER)
        found[newest] = steps
    return found


def _by_size(class_of_token: Array, targets: Array) -> tuple[Array, Array]:
    """Merge classes that lead alike, drop those that lead nowhere; number large ones first."""
    num_states = len(targets)
    weights = np.random.default_rng(0).integers(1, 2**63, num_states, dtype=np.uint64)
    keys = (targets.astype(np.uint64) * weights[:, None]).sum(axis=0, dtype=np.uint64)
    _, first, merged = np.unique(keys, return_index=True, return_inverse=True)
    leads = (targets[:, first] < num_states).any(axis=0)
    counts = np.bincount(merged[class_of_token[class_of_token >= 0]], minlength=len(first)) * leads
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(leads)]
    numbers = np.full(len(first), DEAD, dtype=np.int64)
    numbers[order] = np.arange(len(order))
    new = np.append(numbers[merged], DEAD)[class_of_token]  # DEAD is the last place
    return new.astype(np.int16), targets[:, first[order]]


def _with_edges(
    class_of_token: Array,
    targets: Array,
    room: Array,
    num_states: int,
    eos: list[int],
    other: list[int],
) -> Language:
    """Make the language with its sets of classes and every state's edges."""
    states, classes = (targets < num_states).nonzero()
    order = np.lexsort((classes, targets[states, classes], states))
    states, classes = states[order], classes[order].astype(np.int16)
    ends = targets[states, classes]
    is_first = np.ones(len(states), dtype=np.bool_)
    is_first[1:] = (states[1:] != states[:-1]) | (ends[1:] != ends[:-1])
    starts = is_first.nonzero()[0]
    sizes = np.diff(np.append(starts, len(states)))
    weights = np.random.default_rng(0).integers(1, 2**63, targets.shape[1], dtype=np.uint64)
    keys = np.add.reduceat(weights[classes], starts)
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    members = [classes[starts[i] : starts[i] + sizes[i]] for i in first]
    members += [np.array(eos, dtype=np.int16), np.array(eos + other, dtype=np.int16)]
    edges = [
        *zip(states[starts].tolist(), number.tolist(), ends[starts].tolist(), strict=True),
        *((state, len(first) + 1, num_states) for state in (room == 0).nonzero()[0].tolist()),
        (num_states, len(first), num_states),
    ]
    by_state: list[list[tuple[int, int]]] = [[] for _ in range(num_states + 1)]
    for state, set_number, target in edges:
        by_state[state].append((set_number, target))
    width = max(map(len, by_state))
    edge_sets = np.full((num_states + 1, width), len(members), dtype=np.int32)
    edge_targets = np.zeros((num_states + 1, width), dtype=np.int32)
    for state, own in enumerate(by_state):
        edge_sets[state, : len(own)] = [set_number for set_number, _ in own]
        edge_targets[state, : len(own)] = [target for _, target in own]
    return Language(
        class_of_token=class_of_token,
        set_starts=np.cumsum([0, *map(len, members)]).astype(np.int32),
        set_members=np.concatenate(members),
        edge_sets=edge_sets,
        edge_targets=edge_targets,
        room=np.append(room, 0).astype(np.int32),
    )

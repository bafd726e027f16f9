# SPDX-License-Identifier: Apache-2.0
"""Language over tokens: the transitions between states.

Tokens with equal effect in every state form one class. The classes that lead from one state to
another form a set. There are few distinct sets, so the transitions of a state are a short list of
pairs (set, state).
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from vllm.diffusion.guided.allowance import Allowance, TooLargeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.diffusion.guided.automaton import Array, Automaton
    from vllm.diffusion.guided.vocabulary import Vocabulary

MAX_CELLS = 32_000_000  # states times classes
MAX_CLASSES = 32_000  # class numbers have 16 bits
MAX_EDGE_CELLS = 2_000_000  # states times the most edges of a state; read in every step
MAX_MEMBERS = 100_000  # members of all sets of classes; read for every row of logits
_CELLS_AT_ONCE = 2_000_000  # cells processed together
_CELLS_OF_WORK = 128  # cells that take as long as one operation
DEAD = -1  # class of tokens that no state allows
_MIN_WIDTH, _MAX_WIDTH = 8, 128  # tokens per segment
_NEVER = 2**30  # distance to acceptance if it cannot be reached


class EmptyLanguageError(ValueError):
    """No sequence of tokens is in the language."""


class Ends(NamedTuple):
    """Token ids that end an answer.

    Attributes:
        eos: token that fills the canvas after the answer.
        others: tokens that may directly follow the answer instead.
    """

    eos: int
    others: tuple[int, ...] = ()


class Segments(NamedTuple):
    """All tokens ordered by class, divided into about a thousand rows plus one for every class.

    Attributes:
        tokens: [G, W] int32: tokens of one class per row, ascending; padded with -1.
        starts: [C + 2] int32: first row of each class, then of tokens without a class, then G.
    """

    tokens: Array
    starts: Array


class Edges(NamedTuple):
    """The edges of all states, concatenated; every state has at least one.

    Attributes:
        starts: [Q] int64: the first edge of each state.
        counts: [Q] int64: number of its edges.
        sets: [E] int32.
        targets: [E] int32.
    """

    starts: Array
    counts: Array
    sets: Array
    targets: Array


@dataclass(frozen=True)
class Language:
    """Automaton over tokens with states 0 to Q - 1: 0 is initial, Q - 1 follows the answer's end.

    Attributes:
        class_of_token: [V] int16; the largest classes have the lowest numbers.
        set_starts: [S + 1] int32: start of every set's classes in `set_members`.
        set_members: [M] int16.
        edge_sets: [Q, K] int32: sets of classes that the state allows; S for no edge.
        edge_targets: [Q, K] int32: target states of the edges.
        room: [Q] int32: minimum number of tokens to a complete answer; 0 if it is complete.
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

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the arrays, and an equal amount for the arrays derived from them."""
        return 2 * sum(int(getattr(self, name).nbytes) for name in _NAMES)

    @property
    def least_tokens(self) -> int:
        """Number of tokens of the shortest answer."""
        return int(self.room[0])

    @cached_property
    def segments(self) -> Segments:
        """Order in which columns of logits are read."""
        classes = np.where(self.class_of_token < 0, self.num_classes, self.class_of_token)
        order = np.argsort(classes, kind="stable")
        sizes = np.bincount(classes, minlength=self.num_classes + 1)
        width = min(max(1 << (len(classes) // 1024).bit_length(), _MIN_WIDTH), _MAX_WIDTH)
        starts = np.cumsum([0, *(-(-sizes // width))])
        behind = np.arange(len(classes)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tokens = np.full((starts[-1], width), -1, dtype=np.int32)
        tokens[np.repeat(starts[:-1], sizes) + behind // width, behind % width] = order
        return Segments(tokens, starts.astype(np.int32))

    @cached_property
    def edges(self) -> Edges:
        """The real edges without padding, which fills most rows of states with few edges."""
        is_edge = self.edge_sets < self.num_sets
        is_edge[:, 0] = True
        counts = is_edge.sum(axis=1)
        starts = np.cumsum(counts) - counts
        return Edges(starts, counts, self.edge_sets[is_edge], self.edge_targets[is_edge])

    @cached_property
    def _sets_of_class(self) -> tuple[Array, Array]:
        """The sets of each class, ordered by class, and the start of each class's sets."""
        order = np.argsort(self.set_members, kind="stable")
        starts = np.searchsorted(self.set_members[order], np.arange(self.num_classes + 1))
        sets = np.searchsorted(self.set_starts, order, side="right") - 1
        return sets, starts

    def sets_with(self, kind: int) -> Array:
        """Return the sets that have a class; none for `DEAD`."""
        sets, starts = self._sets_of_class
        own: Array = sets[starts[kind] : starts[kind + 1]] if kind != DEAD else sets[:0]
        return own

    def advance(self, state: int, token: int) -> int:
        """Return the state after a token, or `num_states` if the token is not allowed."""
        kind = int(self.class_of_token[token])
        if state == self.num_states or kind == DEAD:
            return self.num_states
        is_allowed = np.isin(self.edge_sets[state], self.sets_with(kind))
        edges = is_allowed.nonzero()[0]
        return int(self.edge_targets[state, edges[0]]) if len(edges) else self.num_states

    def is_closed(self, state: int) -> bool:
        """Return whether an answer that led to `state` is complete and cannot be continued."""
        if state == self.num_states or self.room[state] > 0:
            return False
        alive = self.edge_sets[state] < self.num_sets
        return bool((self.edge_targets[state, alive] == self.num_states - 1).all())

    def packed(self) -> bytes:
        """Pack the language into bytes for `unpacked`."""
        parts = [(a.dtype.str, a.shape, a.tobytes()) for a in (getattr(self, n) for n in _NAMES)]
        return zlib.compress(msgspec.msgpack.encode(parts), 1)

    @classmethod
    def unpacked(cls, data: bytes) -> Language:
        parts = msgspec.msgpack.decode(zlib.decompress(data))
        return cls(*(np.frombuffer(raw, dtype).reshape(shape) for dtype, shape, raw in parts))


_NAMES = tuple(field.name for field in fields(Language))

# Maximum bytes of the languages that a process caches.
_MAX_BYTES = 256 << 20
# By packed form, in the order of their last use.
_languages: OrderedDict[bytes, Language] = OrderedDict()
_lock = Lock()


def language_from(packed: bytes) -> Language:
    """Return a language from its packed form; recently used languages are cached."""
    with _lock:
        language = _languages.get(packed)
    language = language or Language.unpacked(packed)
    with _lock:
        _languages[packed] = language
        _languages.move_to_end(packed)
        while len(_languages) > 1 and sum(x.num_bytes for x in _languages.values()) > _MAX_BYTES:
            _languages.popitem(last=False)
    return language


def over_tokens(
    automaton: Automaton, vocabulary: Vocabulary, ends: Ends, allowance: Allowance | None = None
) -> Language:
    """Convert an automaton over bytes to a language over tokens, with tokens after the answer.

    Raises:
        TooLargeError: it exceeds a limit; the message contains the numbers.
        EmptyLanguageError: no sequence of tokens is in the language.
    """
    allowance = allowance or Allowance()
    class_of_token, targets = _walk(automaton, vocabulary, allowance)
    targets, room = _useful_states(targets, automaton.accepting[:-1], allowance)
    class_of_token, targets = _by_size(class_of_token, targets, allowance)
    num_classes = targets.shape[1]
    if num_classes + 2 > MAX_CLASSES:
        raise TooLargeError(
            f"it tells {num_classes} kinds of token apart; wanted at most {MAX_CLASSES - 2}"
        )
    class_of_token[list(ends.others)] = num_classes + 1
    class_of_token[ends.eos] = num_classes
    eos, other = [num_classes], [num_classes + 1] if ends.others else []
    class_of_token = class_of_token.astype(np.int16)
    return _with_edges(class_of_token, targets, room, eos, other, allowance)


def _walk(
    automaton: Automaton, vocabulary: Vocabulary, allowance: Allowance
) -> tuple[Array, Array]:
    """Return the classes of tokens [V] int64, and their targets from every state: [Q, C] int32.

    The target Q means that no state is reached. The trie is walked from all states at once. Paths
    with equal effect are merged: a vector contains the target of each state.
    """
    table, num_states = automaton.table, automaton.num_states
    num_kinds = table.shape[1]
    vectors = _Vectors(num_states, allowance)
    nodes = np.array([vectors.number(np.arange(num_states + 1, dtype=np.int32)[None])[0]])
    class_of_token = np.full(vocabulary.num_columns, DEAD, dtype=np.int64)
    for level in vocabulary.levels:
        before = nodes[level.parents]
        alive = (before != 0).nonzero()[0]
        nodes = np.zeros(len(before), dtype=np.int64)
        keys = before[alive] * num_kinds + automaton.classes[level.bytes[alive]]
        distinct, place = np.unique(keys, return_inverse=True)
        numbers = [np.zeros(0, dtype=np.int64)]
        for part in _in_parts(len(distinct), num_states + 1):
            part_keys = distinct[part]
            steps = table[vectors.rows(part_keys // num_kinds), (part_keys % num_kinds)[:, None]]
            numbers.append(vectors.number(steps))
        nodes[alive] = np.concatenate(numbers)[place]
        class_of_token[level.end_tokens] = nodes[level.end_nodes]
    used, inverse = np.unique(class_of_token, return_inverse=True)
    names = used[used > 0]
    if not len(names):
        raise EmptyLanguageError("no tokens of the model spell it")
    class_of_token = inverse - np.count_nonzero(used <= 0)
    return np.maximum(class_of_token, DEAD), vectors.rows(names)[:, :-1].T


def _in_parts(count: int, width: int) -> Iterator[slice]:
    """Divide `count` rows of `width` cells into parts that are processed together."""
    step = max(_CELLS_AT_ONCE // max(width, 1), 1)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


class _Vectors:
    """Distinct vectors of target states, numbered; vector 0 reaches no state from any state."""

    def __init__(self, num_states: int, allowance: Allowance) -> None:
        random = np.random.default_rng(0)
        self._allowance = allowance
        self._weights = random.integers(1, 2**63, num_states + 1, dtype=np.uint64)
        self._known: dict[int, int] = {}
        self._rows = np.empty((8, num_states + 1), dtype=np.int32)
        self.number(np.full((1, num_states + 1), num_states, dtype=np.int32))

    def number(self, rows: Array) -> Array:
        """Return the numbers [N] int64 of rows [N, Q + 1]; new rows get new numbers."""
        self._allowance.spend(len(rows) + rows.size // _CELLS_OF_WORK)
        keys = (rows.astype(np.uint64) * self._weights).sum(axis=1, dtype=np.uint64)
        numbers, new, first = np.empty(len(rows), dtype=np.int64), [], len(self._known)
        for index, key in enumerate(keys.tolist()):
            if key not in self._known:
                self._known[key] = len(self._known)
                new.append(index)
            numbers[index] = self._known[key]
        if len(self._known) * rows.shape[1] > MAX_CELLS:
            raise TooLargeError(
                f"its {rows.shape[1] - 1} states tell more than {MAX_CELLS // rows.shape[1]} "
                f"kinds of token apart; wanted at most {MAX_CELLS} of both together"
            )
        if len(self._known) > len(self._rows):
            more = np.empty((len(self._known), rows.shape[1]), dtype=np.int32)
            self._rows = np.concatenate([self._rows[:first], more])
        self._rows[first : len(self._known)] = rows[new]
        return numbers

    def rows(self, numbers: Array) -> Array:
        return self._rows[numbers]


def _useful_states(targets: Array, accepting: Array, allowance: Allowance) -> tuple[Array, Array]:
    """Keep states that are reached from the start, and that reach acceptance, by whole tokens.

    Returns:
        targets [Q', C] int32, and the minimum number of tokens to acceptance [Q'] int32.
    """
    num_states = len(targets)
    sources, ends = _edges(targets, allowance)
    reached = _distances(sources, ends, np.arange(num_states) == 0, allowance) < _NEVER
    room = _distances(ends, sources, accepting, allowance)
    if room[0] == _NEVER:
        raise EmptyLanguageError("no tokens of the model spell it")
    kept = (reached & (room < _NEVER)).nonzero()[0]
    numbers = np.full(num_states + 1, len(kept), dtype=np.int32)
    numbers[kept] = np.arange(len(kept))
    return numbers[targets[kept]], room[kept].astype(np.int32)


def _edges(targets: Array, allowance: Allowance) -> tuple[Array, Array]:
    """Return the distinct pairs of states that are connected by a token."""
    num_states = len(targets)
    edges = [np.zeros(0, dtype=np.int64)]
    for part in _in_parts(num_states, targets.shape[1]):
        allowance.spend(targets[part].size // _CELLS_OF_WORK)
        states, classes = (targets[part] < num_states).nonzero()
        keys = (states + part.start) * num_states + targets[part][states, classes]
        edges.append(np.unique(keys))
    keys = np.concatenate(edges)
    return keys // num_states, keys % num_states


def _distances(sources: Array, ends: Array, first: Array, allowance: Allowance) -> Array:
    """Return the number of steps from the states `first` [Q] bool to every state.

    The edges lead from `sources` to `ends`.
    """
    order = np.argsort(sources, kind="stable")
    ends, starts = ends[order], np.searchsorted(sources[order], np.arange(len(first) + 1))
    distances = np.where(first, 0, _NEVER)
    frontier, steps = first.nonzero()[0], 0
    while len(frontier):
        steps += 1
        counts = starts[frontier + 1] - starts[frontier]
        allowance.spend(20 + int(counts.sum()) // 16)
        behind = np.repeat(starts[frontier] - np.cumsum(counts) + counts, counts)
        others = ends[behind + np.arange(len(behind))]
        frontier = np.unique(others[distances[others] == _NEVER])
        distances[frontier] = steps
    return distances


def _by_size(class_of_token: Array, targets: Array, allowance: Allowance) -> tuple[Array, Array]:
    """Merge classes with equal targets, drop classes without any; number large classes first."""
    num_states, num_classes = targets.shape
    weights = np.random.default_rng(0).integers(1, 2**63, num_states, dtype=np.uint64)
    keys = np.zeros(num_classes, dtype=np.uint64)
    for part in _in_parts(num_states, num_classes):
        allowance.spend(targets[part].size // _CELLS_OF_WORK)
        weighted = targets[part].astype(np.uint64) * weights[part, None]
        keys += weighted.sum(axis=0, dtype=np.uint64)
    _, first, merged = np.unique(keys, return_index=True, return_inverse=True)
    targets = targets[:, first]
    leads = (targets < num_states).any(axis=0)
    counts = np.bincount(merged[class_of_token[class_of_token >= 0]], minlength=len(first)) * leads
    order = np.argsort(-counts, kind="stable")[: np.count_nonzero(leads)]
    numbers = np.full(len(first), DEAD, dtype=np.int64)
    numbers[order] = np.arange(len(order))
    new = np.append(numbers[merged], DEAD)[class_of_token]  # index -1 selects the appended DEAD
    return new, targets[:, order]


class _EdgesOfStates:
    """Edges of states, in order, each with the set of its classes.

    Attributes:
        states: [E] int64 by part: the source states.
        ends: [E] int32 by part: the target states.
        keys: [E] uint64 by part: hashes of the sets.
        members: [*] int16 by hash: the classes of a set, ascending.
    """

    def __init__(self, num_classes: int) -> None:
        random = np.random.default_rng(0)
        self._weights = random.integers(1, 2**63, num_classes, dtype=np.uint64)
        self.states: list[Array] = []
        self.ends: list[Array] = []
        self.keys: list[Array] = []
        self.members: dict[int, Array] = {}

    def add(self, targets: Array, first: int, dead: int) -> None:
        """Add the edges of some states.

        Args:
            targets: [n, C] target state of each class from each of the states.
            first: number of the first state.
            dead: number that means no target.
        """
        states, classes = (targets < dead).nonzero()
        order = np.lexsort((classes, targets[states, classes], states))
        states, classes = states[order], classes[order].astype(np.int16)
        ends = targets[states, classes]
        is_first = np.ones(len(states), dtype=np.bool_)
        is_first[1:] = (states[1:] != states[:-1]) | (ends[1:] != ends[:-1])
        starts = is_first.nonzero()[0]
        sizes = np.diff(np.append(starts, len(states)))
        keys = np.add.reduceat(self._weights[classes], starts) if len(starts) else self._weights[:0]
        self.states.append(states[starts] + first)
        self.ends.append(ends[starts])
        self.keys.append(keys)
        for key, place in zip(*np.unique(keys, return_index=True), strict=True):
            if int(key) not in self.members:
                members = classes[starts[place] : starts[place] + sizes[place]]
                self.members[int(key)] = members.copy()


def _with_edges(
    class_of_token: Array,
    targets: Array,
    room: Array,
    eos: list[int],
    other: list[int],
    allowance: Allowance,
) -> Language:
    """Return the language with its sets of classes and the edges of every state."""
    num_states, num_classes = targets.shape
    edges = _EdgesOfStates(num_classes)
    for part in _in_parts(num_states, 4 * num_classes):
        allowance.spend(targets[part].size // 16)
        edges.add(targets[part], part.start, num_states)
    states, ends = np.concatenate(edges.states), np.concatenate(edges.ends)
    keys, numbers = np.unique(np.concatenate(edges.keys), return_inverse=True)
    members = [edges.members[key] for key in keys.tolist()]
    members += [np.array(eos, dtype=np.int16), np.array(eos + other, dtype=np.int16)]
    num_members = sum(map(len, members))
    counts = np.bincount(states, minlength=num_states + 1)
    width = max(int((counts[:-1] + (room == 0)).max()), 1)
    if width * num_states > MAX_EDGE_CELLS or num_members > MAX_MEMBERS:
        raise TooLargeError(
            f"its {num_states} states have up to {width} edges of {num_members} kinds of token; "
            f"wanted at most {MAX_EDGE_CELLS} of the first two together, and {MAX_MEMBERS}"
        )
    edge_sets = np.full((num_states + 1, width), len(members), dtype=np.int32)
    edge_targets = np.zeros((num_states + 1, width), dtype=np.int32)
    places = np.arange(len(states)) - np.repeat(np.cumsum(counts) - counts, counts)
    edge_sets[states, places], edge_targets[states, places] = numbers, ends
    whole = (room == 0).nonzero()[0]  # complete states, which the end may follow
    edge_sets[whole, counts[whole]], edge_targets[whole, counts[whole]] = len(keys) + 1, num_states
    edge_sets[-1, 0], edge_targets[-1, 0] = len(keys), num_states
    return Language(
        class_of_token=class_of_token,
        set_starts=np.cumsum([0, *map(len, members)]).astype(np.int32),
        set_members=np.concatenate(members),
        edge_sets=edge_sets,
        edge_targets=edge_targets,
        room=np.append(room, 0).astype(np.int32),
    )

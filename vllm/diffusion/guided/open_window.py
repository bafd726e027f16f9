# SPDX-License-Identifier: Apache-2.0
"""Best or sampled string of a language over the open positions of a forward pass.

The distribution is the product of the model's distributions at all positions, conditioned on the
language (DINGO, Suresh et al., arXiv:2505.23061, finds its most probable string). All candidates
are part of one complete string, so any subset of them may be committed and the rest can still be
filled. First the value of each state (how well it can be completed) is computed backward over
positions. Then each position is chosen, forward from the first state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm.diffusion.guided.automaton import Array
    from vllm.diffusion.guided.language import Language

OPEN = -2  # kind of a position with logits
FREE = -3  # kind of a position where any token may follow later
_NEVER = -1e30  # replaces -inf, whose differences are undefined
_CELLS_AT_ONCE = 4_000_000  # rows times members of sets
# Minimum weight of a token in nats. A token that the model excludes may be the only one that fits.
MIN_WEIGHT = -1e4


class OpenWindow(NamedTuple):
    """Consecutive positions of a canvas, for some of which a forward pass chooses tokens.

    Attributes:
        first: first position, relative to the canvas.
        start: state before it.
        kinds: [n] int32: OPEN, FREE, or the class of the token at the position.
        left: number of positions after the window within which the answer must be complete; if
            negative, the answer must be complete that many positions before the end of the window.
    """

    first: int
    start: int
    kinds: Array
    left: int

    @property
    def stop(self) -> int:
        """End (last + 1) of the window, relative to the canvas."""
        return self.first + len(self.kinds)


class CandidateRows(NamedTuple):
    """Reduction of the logits of R rows to C classes.

    Attributes:
        weights: [R, C] float64: weight of all tokens of the class, in nats relative to the row; at
            temperature 0, weight of its best token relative to the row's best.
        keys: [R, C] float64: among several classes, the class with the largest key is selected.
        tokens: [R, C] int64: best token of the class, or a token drawn from it.
        logprobs: [R, C] float64: log probability of the token for the score.
    """

    weights: Array
    keys: Array
    tokens: Array
    logprobs: Array


def num_uniform(language: Language) -> int:
    """Return the number of uniform random numbers that a row needs for a draw."""
    return 2 * len(language.segments.tokens) + language.num_classes


def read(
    language: Language,
    logits: Array,
    uniform: Array | None,
    temperature: float,
    *,
    is_tempered: bool,
) -> CandidateRows:
    """Reduce rows of logits to the classes of a language.

    A draw has three steps: a token within its segment, a segment within its class, and a class
    within its set.

    Args:
        logits: [R, V] floats.
        uniform: [R, `num_uniform`] numbers in (0, 1), if temperature is above 0.
        is_tempered: whether log probabilities are computed at the temperature, too.
    """
    segments, num_classes = language.segments, language.num_classes
    logits = np.nan_to_num(logits.astype(np.float64), nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    logits = np.maximum(logits, _NEVER)
    missing = np.full((len(logits), 1), _NEVER)
    scaled = np.maximum(logits / temperature, _NEVER) if temperature > 0 else logits
    by_segment = np.append(scaled, missing, axis=1)[:, segments.tokens]
    join: Any = np.maximum if uniform is None else np.logaddexp
    if uniform is None:
        weights, taken = by_segment.max(axis=2), by_segment.argmax(axis=2)
        keys, noise = weights, np.zeros((1, num_classes))
    else:
        within, *others = np.split(uniform, [by_segment.shape[1], 2 * by_segment.shape[1]], axis=1)
        of_segment, noise = (-np.log(-np.log(u)) for u in others)
        weights, taken = _drawn(by_segment, segments.tokens >= 0, within)
        keys = weights + of_segment
    base = join.reduce(weights, axis=1, keepdims=True)
    starts, end = segments.starts[:-2], segments.starts[-2]
    best = np.maximum.reduceat(keys[:, :end], starts, axis=1)
    sizes = np.diff(segments.starts[:-1])
    places = np.where(keys[:, :end] == np.repeat(best, sizes, axis=1), np.arange(end), end)
    places = np.minimum.reduceat(places, starts, axis=1)
    taken = np.take_along_axis(taken, places, axis=1)
    tokens = segments.tokens[places, taken].astype(np.int64)
    scored = scaled if is_tempered else logits
    logprobs = np.take_along_axis(scored, tokens, axis=1)
    logprobs -= np.logaddexp.reduce(scored, axis=1, keepdims=True)
    weights = join.reduceat(weights[:, :end], starts, axis=1) - base
    weights = np.maximum(weights, MIN_WEIGHT)
    return CandidateRows(weights, weights + noise, tokens, logprobs)


def _drawn(log_weights: Array, is_token: Array, uniform: Array) -> tuple[Array, Array]:
    """Draw a token in each segment [R, G, W]; return log-sum-exp [R, G] and the token's index."""
    top = log_weights.max(axis=2)
    shares = np.where(is_token, np.exp(log_weights - top[..., None]), 0.0).cumsum(axis=2)
    total = shares[..., -1]
    taken = (shares <= (uniform * total)[..., None]).sum(axis=2)
    return top + np.log(total), np.minimum(taken, is_token.sum(axis=1) - 1)


def choose(
    language: Language, window: OpenWindow, rows: CandidateRows, draws: Array | None
) -> Array:
    """Choose the class of every row: [R] int64, in the order of the open positions.

    Args:
        language: a language with at least one string for this window.
        window: the window; its open positions are the rows.
        rows: their reduced logits.
        draws: [n] uniform numbers, one per position, for a draw; None for the best string.
    """
    weights = _set_weights(language, window, rows.weights, is_drawn=draws is not None)
    values = _backward(language, window, weights, is_drawn=draws is not None)
    state, row = window.start, 0
    chosen = np.empty(len(rows.weights), dtype=np.int64)
    for index, kind in enumerate(window.kinds.tolist()):
        options = weights[index, language.edge_sets[state]]
        options = options + values[index + 1, language.edge_targets[state]]
        if draws is None or kind == FREE:
            edge = int(options.argmax())
        else:
            shares = np.exp(options - options.max()).cumsum()
            edge = int(np.searchsorted(shares, draws[index] * shares[-1], side="right"))
            edge = min(edge, len(options) - 1)
        if kind == OPEN:
            number = language.edge_sets[state, edge]
            members = language.set_members[slice(*language.set_starts[number : number + 2])]
            chosen[row] = members[rows.keys[row, members].argmax()]
            row += 1
        state = int(language.edge_targets[state, edge])
    return chosen


def can_be_completed(language: Language, window: OpenWindow) -> bool:
    """Return whether the tokens in a window can become part of a complete answer."""
    nothing = np.empty((np.count_nonzero(window.kinds == OPEN), language.num_classes))
    weights = _set_weights(language, window, nothing * 0, is_drawn=False)
    values = _backward(language, window, weights, is_drawn=False)
    return bool(values[0, window.start] > -np.inf)


def _set_weights(
    language: Language, window: OpenWindow, weights: Array, *, is_drawn: bool
) -> Array:
    """Return the weight of each set at each position, [n, S + 1] float64; the last is no set."""
    sums = np.zeros((len(window.kinds), language.num_sets + 1))
    members, starts = language.set_members, language.set_starts[:-1]
    rows, step = (window.kinds == OPEN).nonzero()[0], max(_CELLS_AT_ONCE // len(members), 1)
    for first in range(0, len(rows), step):
        kept = weights[first : first + step, members]
        best = np.maximum.reduceat(kept, starts, axis=1)
        if is_drawn:
            sizes = np.diff(language.set_starts)
            shares = np.exp(kept - np.repeat(best, sizes, axis=1))
            best = best + np.log(np.add.reduceat(shares, starts, axis=1))
        sums[rows[first : first + step], :-1] = best
    known = (window.kinds >= 0).nonzero()[0]
    is_there = window.kinds[known, None] == members
    sums[known, :-1] = np.where(np.logical_or.reduceat(is_there, starts, axis=1), 0.0, -np.inf)
    sums[:, -1] = -np.inf
    return sums


def _backward(language: Language, window: OpenWindow, weights: Array, *, is_drawn: bool) -> Array:
    """Return the value of each state after each position, [n + 1, Q] float64."""
    num, edges = len(window.kinds), language.edges
    values = np.empty((num + 1, language.num_states))
    values[num] = np.where(language.room <= max(window.left, 0), 0.0, -np.inf)
    for index in range(num - 1, -1, -1):
        options = weights[index][edges.sets] + values[index + 1][edges.targets]
        best = np.maximum.reduceat(options, edges.starts)
        if is_drawn and window.kinds[index] != FREE:
            finite = np.maximum(best, -1e300)
            shares = np.exp(options - np.repeat(finite, edges.counts))
            with np.errstate(divide="ignore"):
                best = finite + np.log(np.add.reduceat(shares, edges.starts))
        values[index] = best
        # The answer must be complete here.
        if index == num + window.left:
            values[index, language.room > 0] = -np.inf
    return values

# SPDX-License-Identifier: Apache-2.0
"""Changes of candidates' logits that a request asks for: penalties, biases, forbidden tokens.

They are upstream's, in its order and in float32: allowed tokens, bad words, minimum length, bias,
repetition, frequency and presence penalty. They count the tokens that are committed before the
forward. Tokens that one forward commits do not affect each other, except in a causal forward, whose
rows count the tokens before their position, drafts included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.edits import Edits
    from vllm.diffusion.request.params import DiffusionParams


MAX_COMPARED = 65536  # tokens compared at once, to limit memory


class RowEdits(NamedTuple):
    """Changes of R rows of logits, on the host. C tokens are counted, F logits are forbidden.

    Attributes:
        edits: the requested edits.
        allowed, biased: [A], [B] int64, tokens of `allowed_token_ids` and of `logit_bias`.
        bias: [B] float32, values to add to the logits of `biased`.
        counted: [C] int64, ascending: tokens that appear in the prompt or in the answer.
        in_prompt: [C] bool, whether they appear in the prompt.
        counts: [1, C] or [R, C] float32, how often they appear in the answer.
        never: [N] int64, tokens that are forbidden in every row.
        early: rows in which the tokens of `ends` are forbidden, too.
        ends: [K] int64, tokens that end an answer.
        rows, columns: [F] int64, row and token of each other forbidden logit.
    """

    edits: Edits
    allowed: Array
    biased: Array
    bias: Array
    counted: Array
    in_prompt: Array
    counts: Array
    never: Array
    early: slice
    ends: Array
    rows: Array
    columns: Array

    def piece(self, rows: slice) -> RowEdits:
        """Return the changes of some of the rows, counted from the first of them."""
        is_within = (self.rows >= rows.start) & (self.rows < rows.stop)
        counts = self.counts if len(self.counts) == 1 else self.counts[rows]
        own_rows, columns = self.rows[is_within] - rows.start, self.columns[is_within]
        first, last = self.early.start - rows.start, self.early.stop - rows.start
        early = slice(max(first, 0), max(last, 0))
        return self._replace(counts=counts, early=early, rows=own_rows, columns=columns)


class LogitEditor:
    """Computes the changes of logits for a request's edits, forward by forward.

    Tokens of the answer are the tokens committed on its canvas and in the gaps of its prompt.
    Tokens that would end the answer are not counted, because an answer has none before its end.

    Args:
        tokens: [T] int64, sequence of the request before decoding.
    """

    def __init__(self, params: DiffusionParams, tokens: Array, prompt_length: int) -> None:
        if params.edits is None:
            raise ValueError("edits: wanted some, got None")
        edits = self._edits = params.edits
        self._mask_id = params.mask_id
        self._allowed = _ids(edits.allowed_token_ids)
        self._never, self._early_ends = _ids(edits.never), _ids(edits.end_ids)
        self._words = [_ids(word) for word in edits.bad_words if len(word) > 1]
        self._biased = _ids(token for token, _ in edits.logit_bias)
        self._bias = np.array([value for _, value in edits.logit_bias], dtype=np.float32)
        self._start = prompt_length
        self._ends = _ids(sorted(params.stop_ids))
        self._open = tokens == params.mask_id
        # Positions that only fill up the last block are not part of the answer.
        self._open[prompt_length + params.num_open :] = False
        prompt = tokens[:prompt_length][tokens[:prompt_length] != params.mask_id]
        suffix = _ids(params.suffix_ids)
        self._prompt = np.unique(np.concatenate((prompt, suffix)))

    def grow(self, length: int) -> None:
        """Continue on a sequence of `length` positions, which ends with new masks."""
        more = length - len(self._open)
        self._open = np.pad(self._open, (0, more), constant_values=True)

    def of(self, tokens: Array, positions: Array, *, is_causal: bool = False) -> RowEdits:
        """Return the changes of the rows of `positions` [R] int64, ascending, of the sequence.

        Args:
            tokens: [T] int64, the sequence.
            positions: the positions that the rows predict.
            is_causal: whether a row depends only on the tokens before its position.
        """
        edits = self._edits
        counted, in_prompt = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
        counts = np.empty((1, 0), dtype=np.float32)
        if edits.counts_tokens:
            count = self._counted_before if is_causal else self._counted
            counted, in_prompt, counts = count(tokens, positions)
        first, last = np.searchsorted(positions, (self._start, self._start + edits.min_tokens))
        early = slice(int(first), int(last))
        complete = self._ended if is_causal else self._completed
        rows, columns = complete(tokens, positions)
        if self._allowed.size and rows.size:
            rows, columns = self._without_blocked_rows(early, rows, columns)
        return RowEdits(
            edits,
            self._allowed,
            self._biased,
            self._bias,
            counted,
            in_prompt,
            counts,
            self._never,
            early,
            self._early_ends,
            rows,
            columns,
        )

    def _counted(self, tokens: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Return tokens, whether they appear in the prompt, and their counts in the answer."""
        answer = tokens[self._open & (tokens != self._mask_id)]
        answer = answer[~np.isin(answer, self._ends)]
        unique, times = np.unique(answer, return_counts=True)
        counted = np.union1d(self._prompt, unique)
        counts = np.zeros((1, counted.size), dtype=np.float32)
        counts[0, np.searchsorted(counted, unique)] = times
        answer_tokens = tokens[positions]
        # A token does not count at a position where it may be replaced.
        if (answer_tokens != self._mask_id).any():
            is_counted = np.atleast_1d(self._open[positions] & ~np.isin(answer_tokens, self._ends))
            counts = counts - ((counted == answer_tokens[:, None]) & is_counted[:, None])
        return counted, np.isin(counted, self._prompt), counts

    def _counted_before(self, tokens: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Return the same as `_counted`, with the tokens before each position only."""
        counts_token = self._open & (tokens != self._mask_id) & ~np.isin(tokens, self._ends)
        at = counts_token.nonzero()[0]
        counted = np.union1d(self._prompt, tokens[at])
        counts = np.zeros((positions.size, counted.size), dtype=np.float32)
        # Each token counts in the rows from the first one whose position comes after it.
        first = np.searchsorted(positions, at, side="right")
        at, first = at[first < positions.size], first[first < positions.size]
        np.add.at(counts, (first, np.searchsorted(counted, tokens[at])), 1)
        return counted, np.isin(counted, self._prompt), counts.cumsum(axis=0)

    def _ended(self, tokens: Array, positions: Array) -> tuple[Array, Array]:
        """Return rows, and the tokens that would end a bad word that the canvas before begins."""
        nothing = np.empty(0, dtype=np.int64)
        rows, columns = [nothing], [nothing]
        for word in self._words:
            own = (positions >= self._start + len(word) - 1).nonzero()[0]
            before = positions[own][:, None] - np.arange(len(word) - 1, 0, -1)
            own = own[(tokens[before] == word[:-1]).all(axis=1)]
            rows.append(own)
            columns.append(np.full(own.size, word[-1]))
        pairs = np.unique(np.stack((np.concatenate(rows), np.concatenate(columns))), axis=1)
        return pairs[0], pairs[1]

    def _completed(self, tokens: Array, positions: Array) -> tuple[Array, Array]:
        """Return rows, and the tokens that would complete a bad word there with the tokens around.

        For positions on the canvas, only tokens of the canvas count; for gaps of the prompt, all
        tokens.
        """
        lowest = 0 if positions.size and positions[0] < self._start else self._start
        nothing = np.empty(0, dtype=np.int64)
        places, words = [nothing], [nothing]
        for word in self._words if positions.size else ():
            begin = max(lowest, int(positions[0]) - len(word) + 1)
            end = min(int(positions[-1]), len(tokens) - len(word)) + 1
            starts, place = _nearly_at(word, tokens, np.arange(begin, max(end, begin)))
            is_missing = place >= 0
            at = starts[is_missing] + place[is_missing]
            is_seen = (at < self._start) | (starts[is_missing] >= self._start)
            places.append(at[is_seen])
            words.append(word[place[is_missing][is_seen]])
            for at in self._covered(starts[~is_missing], len(word)):
                places.append(at)
                words.append(tokens[at])
        pairs = np.stack((np.concatenate(places), np.concatenate(words)))
        at, columns = np.unique(pairs, axis=1)
        first, last = (np.searchsorted(at, positions, side) for side in ("left", "right"))
        times = last - first
        order = np.arange(times.sum()) + np.repeat(last - np.cumsum(times), times)
        return np.repeat(np.arange(positions.size), times), columns[order]

    def _covered(self, starts: Array, length: int) -> tuple[Array, Array]:
        """Return positions of the whole words at `starts`: in the prompt, and on the canvas."""
        every = _union(starts, length)
        on_canvas = _union(starts[starts >= self._start], length)
        return every[every < self._start], on_canvas

    def _without_blocked_rows(
        self, early: slice, rows: Array, columns: Array
    ) -> tuple[Array, Array]:
        """Drop rows in which forbidding bad words would leave no allowed token."""
        allowed = np.setdiff1d(self._allowed, self._never)
        is_early = (rows >= early.start) & (rows < early.stop)
        is_end = np.isin(columns, self._early_ends)
        takes_one = np.isin(columns, allowed) & ~(is_early & is_end)
        taken = np.bincount(rows[takes_one], minlength=int(rows.max()) + 1)
        has = np.full(taken.size, allowed.size)
        has[early] -= np.isin(allowed, self._early_ends).sum()
        has_some = taken < has
        return rows[has_some[rows]], columns[has_some[rows]]


def _ids(tokens: Iterable[int]) -> Array:
    return np.array([*tokens], dtype=np.int64)


def _union(starts: Array, length: int) -> Array:
    """Return the positions, ascending, of words of a length that begin at `starts`, ascending."""
    if not starts.size:
        return starts
    changes = np.zeros(int(starts[-1]) + length + 1, dtype=np.int64)
    changes[starts] += 1
    changes[starts + length] -= 1
    return np.cumsum(changes).nonzero()[0]


def _nearly_at(word: Array, tokens: Array, starts: Array) -> tuple[Array, Array]:
    """Return where a word appears except for one token at most, and the index of that token in it.

    The index is -1 if the whole word appears. Few starts are left after some tokens of the word, so
    the parts that are compared at once grow.

    Args:
        word: [L] int64.
        tokens: [T] int64.
        starts: [S] int64, positions from 0 to T - L.
    """
    place = np.full(starts.size, -1)
    begin, size = 0, 4
    while begin < len(word) and starts.size:
        part = word[begin : begin + size]
        differs = tokens[starts[:, None] + np.arange(begin, begin + len(part))] != part
        times = differs.sum(axis=1)
        is_near = times + (place >= 0) <= 1
        starts, place, times, differs = (x[is_near] for x in (starts, place, times, differs))
        place = np.where(times > 0, begin + differs.argmax(axis=1), place)
        begin, size = begin + size, min(2 * size, max(4, MAX_COMPARED // max(starts.size, 1)))
    return starts, place

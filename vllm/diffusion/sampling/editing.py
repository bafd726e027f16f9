# SPDX-License-Identifier: Apache-2.0
"""Changes of candidates' logits that a request asks for: penalties, biases, forbidden tokens.

They are upstream's, in its order and in float32: allowed tokens, bad words, least length, bias,
repetition, frequency and presence penalty. What has been committed when the forward begins counts;
tokens that one forward commits do not see each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.diffusion.ops import Array
    from vllm.diffusion.request.edits import Edits
    from vllm.diffusion.request.params import DiffusionParams


class RowEdits(NamedTuple):
    """Changes of R rows of logits, on the host. C tokens are counted, F logits are forbidden.

    Attributes:
        edits: what is asked for.
        allowed, biased: [A], [B] int64, tokens of `allowed_token_ids` and of `logit_bias`.
        bias: [B] float32, what is added to the logits of `biased`.
        counted: [C] int64, ascending: tokens that stand in the prompt or in the answer.
        in_prompt: [C] bool, whether they stand in the prompt.
        counts: [1, C] or [R, C] float32, how often they stand in the answer.
        rows, columns: [F] int64, row and token of each logit that is forbidden.
    """

    edits: Edits
    allowed: Array
    biased: Array
    bias: Array
    counted: Array
    in_prompt: Array
    counts: Array
    rows: Array
    columns: Array

    def piece(self, rows: slice) -> RowEdits:
        """Return the changes of some of the rows, which count from the first of them."""
        own = (self.rows >= rows.start) & (self.rows < rows.stop)
        counts = self.counts if len(self.counts) == 1 else self.counts[rows]
        own_rows, columns = self.rows[own] - rows.start, self.columns[own]
        return self._replace(counts=counts, rows=own_rows, columns=columns)


class LogitEditor:
    """Finder of the changes that a request's edits ask for, forward after forward.

    Tokens of the answer are those committed on its canvas, and in the gaps of its prompt. Those
    that would end the answer are not counted: an answer has none before its end.

    Args:
        params: parameters of the request, with edits.
        tokens: [T] int64, its sequence before decoding.
        prompt_length: tokens before the canvas.
    """

    def __init__(self, params: DiffusionParams, tokens: Array, prompt_length: int) -> None:
        if params.edits is None:
            raise ValueError("edits: wanted some, got None")
        edits = self._edits = params.edits
        self._mask_id = params.mask_id
        self._allowed = np.array(edits.allowed_token_ids, dtype=np.int64)
        self._biased = np.array([token for token, _ in edits.logit_bias], dtype=np.int64)
        self._bias = np.array([value for _, value in edits.logit_bias], dtype=np.float32)
        self._start = prompt_length
        self._ends = np.array(sorted(params.stop_ids), dtype=np.int64)
        self._open = tokens == params.mask_id
        self._open[prompt_length + params.num_open :] = False  # what fills it up is no answer
        prompt = tokens[:prompt_length][tokens[:prompt_length] != params.mask_id]
        suffix = np.array(params.suffix_ids, dtype=np.int64)
        self._prompt = np.unique(np.concatenate((prompt, suffix)))

    def of(self, tokens: Array, positions: Array) -> RowEdits:
        """Return the changes of the rows of `positions` [R] int64, ascending, of the sequence."""
        edits, size = self._edits, positions.size
        counted, in_prompt = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
        counts = np.empty((1, 0), dtype=np.float32)
        if edits.counts_tokens:
            counted, in_prompt, counts = self._counted(tokens, positions)
        forbidden = [(np.arange(size), token) for token in edits.never]
        early = (positions >= self._start) & (positions < self._start + edits.min_tokens)
        forbidden += [(early.nonzero()[0], token) for token in edits.end_ids]
        completed = list(self._completed(tokens, positions))
        if self._allowed.size:
            completed = self._left_some(forbidden, completed, size)
        forbidden += completed
        rows = [own for own, _ in forbidden]
        columns = [np.full(own.size, token) for own, token in forbidden]
        nothing = [np.empty(0, dtype=np.int64)]
        return RowEdits(
            edits,
            self._allowed,
            self._biased,
            self._bias,
            counted,
            in_prompt,
            counts,
            np.concatenate(rows + nothing),
            np.concatenate(columns + nothing),
        )

    def _counted(self, tokens: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Return tokens, whether they stand in the prompt, and how often in the answer."""
        answer = tokens[self._open & (tokens != self._mask_id)]
        answer = answer[~np.isin(answer, self._ends)]
        found, times = np.unique(answer, return_counts=True)
        counted = np.union1d(self._prompt, found)
        counts = np.zeros((1, counted.size), dtype=np.float32)
        counts[0, np.searchsorted(counted, found)] = times
        own = tokens[positions]
        if (own != self._mask_id).any():  # a token does not count where it may be replaced
            is_counted = np.atleast_1d(self._open[positions] & ~np.isin(own, self._ends))
            counts = counts - ((counted == own[:, None]) & is_counted[:, None])
        return counted, np.isin(counted, self._prompt), counts

    def _completed(self, tokens: Array, positions: Array) -> Iterator[tuple[Array, int]]:
        """Yield rows, and the token that would complete a bad word there with what stands around.

        Around the canvas nothing counts; around gaps of the prompt, all that stands there.
        """
        lowest = np.where(positions >= self._start, self._start, 0)
        for word in self._edits.bad_words:
            for place, token in enumerate(word if len(word) > 1 else ()):
                first = positions - place
                is_complete = (first >= lowest) & (first + len(word) <= len(tokens))
                for index, other in enumerate(word):
                    if index != place:
                        at = np.clip(first + index, 0, len(tokens) - 1)
                        is_complete &= tokens[at] == other
                yield is_complete.nonzero()[0], token

    def _left_some(
        self,
        forbidden: list[tuple[Array, int]],
        completed: list[tuple[Array, int]],
        size: int,
    ) -> list[tuple[Array, int]]:
        """Return what completes bad words, without rows where no allowed token would be left."""
        is_left = np.ones((size, self._allowed.size), dtype=np.bool_)
        for rows, token in (*forbidden, *completed):
            is_left[rows[:, None], self._allowed == token] = False
        has_some = np.logical_or.reduce(is_left, axis=1)
        return [(rows[has_some[rows]], token) for rows, token in completed]

# SPDX-License-Identifier: Apache-2.0
"""Drafts from a text that a client expects as the answer, or as a part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array

# Tokens that must agree so that an answer that left the text is found in it again: as many as
# possible, at most the first number, at least the last one.
MATCHED = (16, 8, 4, 3)


class Prediction:
    """The place of an answer in an expected text.

    After the first wrong token the answer is expected to go on after the token that it replaces.
    After the second wrong token in a row it has left the text. Then it is expected where the text
    has its latest tokens, nearest to the place where it left; without such a place nothing is
    expected.

    Args:
        token_ids: tokens of the text.
    """

    def __init__(self, token_ids: tuple[int, ...]) -> None:
        self._ids = np.array(token_ids, dtype=np.int64)
        self._at: int | None = 0  # the place of the next token; None if there is none
        self._last = 0  # the latest place
        self._num_wrong = 0  # wrong tokens in a row
        self._num_read = 0  # tokens of the answer that have been compared

    def after(self, answer: Array, count: int) -> Array:
        """Return the at most `count` tokens [R] that are expected after `answer` [N].

        The answer of the previous call is a prefix of `answer`.
        """
        for token in answer[self._num_read :].tolist():
            self._read(token)
        self._num_read = answer.size
        if self._at is None or self._num_wrong:
            found = self._found(answer)
            if found is not None:
                self._at, self._num_wrong = found, 0
        if self._at is None:
            return self._ids[:0]
        return self._ids[self._at : self._at + count]

    def _read(self, token: int) -> None:
        at = self._at
        if at is None:
            return
        is_right = at < self._ids.size and self._ids[at] == token
        self._num_wrong = 0 if is_right else self._num_wrong + 1
        self._last = at
        self._at = at + 1 if self._num_wrong < 2 else None

    def _found(self, answer: Array) -> int | None:
        """Return the place after the latest tokens of an answer, or None."""
        for size in MATCHED:
            if answer.size < size or self._ids.size < size:
                continue
            windows = np.lib.stride_tricks.sliding_window_view(self._ids, size)
            (places,) = (windows == answer[-size:]).all(axis=1).nonzero()
            if places.size:
                ends = places + size
                return int(ends[np.abs(ends - self._last).argmin()])
        return None

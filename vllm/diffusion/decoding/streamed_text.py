# SPDX-License-Identifier: Apache-2.0
"""LLaDA2.2 on a canvas that begins with a text: replaces, deletes and inserts tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm.diffusion.decoding.base import Commit
from vllm.diffusion.decoding.levenshtein import Levenshtein
from vllm.diffusion.decoding.text_scan import TextScan, end_of

if TYPE_CHECKING:
    from vllm.diffusion.decoding.base import Array, Candidates, Mask
    from vllm.diffusion.request.params import DiffusionParams


class StreamedText(TextScan, Levenshtein):
    """Revises the blocks of a text that `Levenshtein` would change, and loses no token.

    The text is a stream. A token that an insertion moves beyond the end of its block begins the
    next block, and a block that a deletion shortens takes the next tokens of the stream. Pinned
    tokens at the end of the text move as a whole. The stream ends with the text, or with masks up
    to the longest answer.

    Only a deletion removes a token of the text: no token that ends an answer is written before the
    last one, and nothing is inserted that would move the last one beyond the longest answer.
    """

    def __init__(self, params: DiffusionParams, prompt_length: int) -> None:
        super().__init__(params, prompt_length)
        if params.revision is None or params.pad_id is None:
            raise ValueError("revision: wanted a text and an end token, got None")
        self._pad_id, self._end_ids = params.pad_id, sorted(params.stop_ids)
        text = np.array(params.revision.token_ids)
        length = text.size if params.ends_with_text else params.max_tokens
        self._stop = prompt_length + length  # end of the stream
        # Marks of all positions, which move with the tokens: pinned tokens, masks that no insertion
        # has made, and tokens of the text.
        self._marks = np.stack([self._is_fixed, *np.ones((2, self._is_fixed.size), dtype=np.bool_)])
        self._is_fixed, self._is_own, self._is_text = self._marks
        num_text = params.revision.num_before_end(params.stop_ids)
        self._is_text[:] = False
        self._is_text[prompt_length:][:num_text] = text[:num_text] != self._mask
        self._text_stop = end_of(self._is_text, prompt_length)  # end of the last token of the text
        self._stream = np.empty(0, dtype=np.int64)  # tokens from the block on, after a decision
        self.num_unconfirmed = self._end - self._stop

    @property
    def _first_row(self) -> int:
        """First position of the block that is not of the prompt."""
        return max(self.start, self.prompt_length)

    def _would_change(self, candidates: Candidates) -> Mask:
        positions = candidates.positions
        current, best = self._tokens[positions], self._take_best(positions)
        is_doubted = self._is_doubted(candidates, best, current) & ~self._is_fixed[positions]
        changes: Mask = is_doubted | (current == self._mask)
        return changes

    def _first_masks(self, first: int) -> Mask:
        is_own: Mask = self._is_own[first : first + self._before.size]
        return is_own & super()._first_masks(first)

    def _may_edit(self) -> Mask:
        first = self._first_row
        return super()._may_edit() & ~self._is_fixed[first : first + self._before.size]

    def adjust_logits(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See `Levenshtein`; also forbid end tokens before the last token of the text."""
        if self._end_ids:
            is_early = positions < self._text_stop - self.prompt_length
            ends = logits[:, self._end_ids]
            logits[:, self._end_ids] = ends.masked_fill(is_early[:, None], -torch.inf)
        return super().adjust_logits(logits, positions)

    def decide(self, candidates: Candidates) -> Commit:
        self._stream = self._stream[:0]
        commit = super().decide(candidates)
        self._parts = []
        if not self._stream.size:
            return commit  # no block has changed
        first = self._first_row
        changed = (self._stream != self._tokens[first : first + self._stream.size]).nonzero()[0]
        return Commit(first + changed, self._stream[changed])

    def _scan(self, written: Array) -> Array:
        """Return the block [R] after deletions and insertions, and move the stream after it."""
        first, num_rows, length = self._first_row, written.size, self._stop - self._first_row
        written = self._within_room(written)[:length]
        rest = np.arange(written.size, length)
        tokens = np.append(self._plain_tokens(written), self._tokens[first + rest])
        sources = self._move(np.append(self._sources(written), rest))
        num_ends = max(num_rows, length) - sources.size
        moved = np.where(sources < 0, self._mask, tokens[sources])
        self._stream = np.pad(moved, (0, max(num_ends, 0)), constant_values=self._pad_id)
        self._is_first = self._is_own[first : first + num_rows]
        return self._without_early_ends(self._stream[:num_rows])

    def _within_room(self, written: Array) -> Array:
        """Return `written` [R] without the last insertions that the longest answer has no room for.

        Only the tokens of the text need room.
        """
        is_of_text = np.arange(written.size) < self._text_stop - self._first_row
        inserts = is_of_text & (written == self._split)
        growth = int(inserts.sum()) - int((is_of_text & (written == self._delete)).sum())
        num_more = growth - (self._end - self._text_stop)
        if num_more > 0:
            rows = inserts.nonzero()[0][-num_more:]
            written = written.copy()
            written[rows] = self._before[rows]
        return written

    def _move(self, sources: Array) -> Array:
        """Move the marks of the stream from the block on, and return the new stream's sources [N].

        Args:
            sources: previous index of each token of the stream; -1 for a new mask. The result is
                cut at the longest answer, or has more masks at its end.
        """
        first, old_stop = self._first_row, self._stop
        growth = sources.size - (old_stop - first)
        sources = sources[: self._end - first]
        num_masks = 0 if self.params.ends_with_text else max(-growth, 0)
        sources = np.pad(sources, (0, num_masks), constant_values=-1)
        stop = self._stop = first + sources.size
        marks = (sources >= 0) & self._marks[:, first + sources]
        self._is_fixed[first : max(stop, old_stop)] = True
        self._marks[:, first:stop] = marks
        # The next blocks count these masks as masks that they begin with.
        self._is_own[max(stop - num_masks, first + self._before.size) : stop] = True
        self._text_stop = end_of(self._is_text[:stop], self.prompt_length)
        self._open_stop = end_of(~self._is_fixed[:stop], first)
        self.num_unconfirmed = self._end - stop
        return sources

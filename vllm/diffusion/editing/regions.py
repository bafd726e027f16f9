# SPDX-License-Identifier: Apache-2.0
"""A region of a text as a canvas: its tokens, the pinned ones, and the text after the revision.

The text after the revision is decoded only where tokens differ. Everything else is copied, so its
bytes stay even if the tokenizer normalises a text.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.diffusion.editing.differences import Edit

Span = tuple[int, int]  # first character or position, and last + 1


class Decoder(Protocol):
    """The function of a tokenizer that turns tokens into text."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Region(NamedTuple):
    """A text on a canvas.

    Attributes:
        text: the text.
        token_ids: [N] its tokens, and mask tokens at the place of the cursor.
        spans: [N] characters of each token; empty for mask tokens.
    """

    text: str
    token_ids: list[int]
    spans: list[Span]

    @classmethod
    def of(
        cls,
        text: str,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        masks: Sequence[int] = (),
        cursor: int = 0,
    ) -> Region:
        """Return a region with `masks` after the tokens that begin before the cursor."""
        at = sum(start < cursor for start, _ in spans)
        end = spans[at - 1][1] if at else 0
        places = [*spans[:at], *((end, end) for _ in masks), *spans[at:]]
        return cls(text, [*token_ids[:at], *masks, *token_ids[at:]], places)

    def outside(self, start: int, stop: int) -> list[list[int]]:
        """Return the positions, as ranges, of tokens that are not within characters [start, stop).

        A token across a border is outside.
        """
        is_outside = [
            stop_of > start_of and (start_of < start or stop_of > stop)
            for start_of, stop_of in self.spans
        ]
        borders = [at for at, (a, b) in enumerate(pairwise([False, *is_outside, False])) if a != b]
        return [[*pair] for pair in zip(borders[::2], borders[1::2], strict=True)]

    def revised(self, edits: Iterable[Edit], decoder: Decoder) -> str:
        """Return the text after edits; special tokens among their tokens add no text.

        Args:
            edits: edits of `token_ids`, which ascend and do not overlap.
            decoder: the tokenizer.
        """
        result, done, before = list[str](), 0, list[int]()
        last = 0
        for first, stop, ids in self._whole_characters(edits):
            if first > last:
                before = self.token_ids[first - 1 : first]
            start, end = self._characters(first, stop)
            result += [self.text[done:start], _added(before, ids, decoder)]
            done, last, before = max(end, start), stop, [*before, *ids][-1:]
        return "".join([*result, self.text[done:]])

    def _whole_characters(self, edits: Iterable[Edit]) -> list[tuple[int, int, list[int]]]:
        """Return edits as first token, end and new tokens, extended to whole characters."""
        runs, length = list[tuple[int, int, list[int]]](), len(self.token_ids)
        for edit in edits:
            first, stop = edit.start, edit.stop
            while 0 < first < length and self._share(first - 1, first):
                first -= 1
            while 0 < stop < length and self._share(stop - 1, stop):
                stop += 1
            ids, done = list[int](), first
            if runs and first < runs[-1][1]:  # both are in one character
                first, end, ids = runs.pop()
                done = min(end, edit.start)
                del ids[len(ids) - (end - done) :]  # unchanged tokens, which this edit handles
            ids += [*self.token_ids[done : edit.start], *edit.new_ids]
            runs.append((first, stop, ids + self.token_ids[edit.stop : stop]))
        return runs

    def _characters(self, first: int, stop: int) -> Span:
        """Return the characters of tokens [first, stop)."""
        if first < stop:
            return self.spans[first][0], self.spans[stop - 1][1]
        place = self.spans[first - 1][1] if first else 0
        return place, place

    def _share(self, left: int, right: int) -> bool:
        """Whether two neighbouring tokens have a part of the same character."""
        return self.spans[right][0] < self.spans[left][1]


def _added(before: Sequence[int], ids: Sequence[int], decoder: Decoder) -> str:
    """Return the text that tokens add to the token before them, if there is one.

    Some tokenizers write no space before the first word of a text.
    """
    head = decoder.decode([*before], skip_special_tokens=True)
    whole = decoder.decode([*before, *ids], skip_special_tokens=True)
    if whole.startswith(head):
        return whole[len(head) :]
    return decoder.decode([*ids], skip_special_tokens=True)

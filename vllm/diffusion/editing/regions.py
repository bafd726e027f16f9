# SPDX-License-Identifier: Apache-2.0
"""A region of a text as a canvas: its tokens, the pinned ones, and the text after the revision.

The text after the revision is decoded only where tokens differ. Everything else is copied, so its
bytes stay even if the tokenizer normalises a text.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def revised(self, new_ids: Sequence[int], decoder: Decoder) -> str:
        """Return the text with other tokens; special tokens among them add no text.

        Args:
            new_ids: [N] the tokens after the revision.
            decoder: the tokenizer.
        """
        result, done, at = list[str](), 0, 0
        while at < len(new_ids):
            if new_ids[at] == self.token_ids[at]:
                at += 1
                continue
            first, last = self._characters(new_ids, at)
            start, stop = self.spans[first][0], self.spans[last - 1][1]
            result += [self.text[done:start], _added(new_ids, first, last, decoder)]
            done, at = max(stop, start), last
        return "".join([*result, self.text[done:]])

    def _characters(self, new_ids: Sequence[int], at: int) -> Span:
        """Return the run of changed tokens from a position on, extended to whole characters."""
        first, last = at, at + 1
        while last < len(new_ids) and (
            new_ids[last] != self.token_ids[last] or self._share(last - 1, last)
        ):
            last += 1
        while first > 0 and self._share(first - 1, first):
            first -= 1
        return first, last

    def _share(self, left: int, right: int) -> bool:
        """Whether two neighbouring tokens have a part of the same character."""
        return self.spans[right][0] < self.spans[left][1]


def _added(ids: Sequence[int], first: int, last: int, decoder: Decoder) -> str:
    """Return the text that tokens [first, last) add to the token before them.

    Some tokenizers write no space before the first word of a text.
    """
    before = list(ids[max(first - 1, 0) : first])
    head = decoder.decode(before, skip_special_tokens=True)
    whole = decoder.decode([*before, *ids[first:last]], skip_special_tokens=True)
    if whole.startswith(head):
        return whole[len(head) :]
    return decoder.decode(list(ids[first:last]), skip_special_tokens=True)

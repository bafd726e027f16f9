# SPDX-License-Identifier: Apache-2.0
"""Pages for the keys and values that drafts compute."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion.core.pages import PAGE_SIZE, num_pages
from vllm.diffusion.memory import OUT_OF_MEMORY

if TYPE_CHECKING:
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.memory import KeptSequence, PageAllocator

MAX_DRAFTS_WITH_PAGES = 64  # drafts of all requests


class DraftPages:
    """Pages for the drafts of requests with cached keys and values.

    A forward writes the keys and values of its window, so the current state and its drafts cannot
    share the pages of the window. Each draft has its own pages for the positions of one window, and
    all its other keys and values are a copy of the request's pages. Only forwards of other windows
    change the originals, so the copy is repeated when the window changes.

    Args:
        pages: the pages of all requests.
        can_grow: whether the page store may grow for drafts.
    """

    def __init__(self, pages: PageAllocator, *, can_grow: bool) -> None:
        self._pages, self._can_grow = pages, can_grow
        self._held: dict[str, _RequestPages] = {}  # by request ID

    def of(self, canvas: Canvas, first: int, stop: int, count: int) -> list[KeptSequence]:
        """Return the pages of up to `count` drafts, for positions `first` to `stop` of a request.

        Returns fewer if the page store is full.
        """
        held = self._held.get(canvas.req_id)
        own_pages = first // PAGE_SIZE, num_pages(stop)
        if held is not None and held.own_pages != own_pages:
            self.release(canvas.req_id)
            held = None
        if held is None:
            held = self._held[canvas.req_id] = _RequestPages(own_pages, (first, stop), [])
        num_held = len(held.sequences)
        names = [_owner_name(canvas.req_id, number) for number in range(max(count, num_held))]
        if held.window != (first, stop):
            held.window = first, stop
            self._pages.refresh_drafts(canvas.req_id, names[:num_held])
        if num_held < count:
            written = [range(start + first, start + stop) for start in canvas.window.kept_starts]
            room = MAX_DRAFTS_WITH_PAGES - sum(len(held.sequences) for held in self._held.values())
            with suppress(*OUT_OF_MEMORY):
                more = names[num_held:][: max(room, 0)]
                held.sequences += self._pages.allocate_drafts(
                    canvas.req_id, written, more, can_grow=self._can_grow
                )
        return held.sequences[:count]

    def invalidate_copies(self, req_id: str, window: Window) -> None:
        """Invalidate copies that the next forward of a request, with another window, may change."""
        held = self._held.get(req_id)
        if held is not None and not held.window[0] <= window.first < window.stop <= held.window[1]:
            held.window = -1, -1

    def release(self, req_id: str) -> None:
        """Release a request's draft pages."""
        held = self._held.pop(req_id, None)
        for number in range(0 if held is None else len(held.sequences)):
            self._pages.release(_owner_name(req_id, number))

    def release_all(self) -> None:
        """Release the draft pages of all requests."""
        for req_id in list(self._held):
            self.release(req_id)


@dataclass
class _RequestPages:
    """Draft pages of a request.

    Attributes:
        own_pages: first and last + 1 of the request's pages that the draft pages replace.
        window: first and last + 1 of the positions for which the copies are valid.
        sequences: pages of each draft.
    """

    own_pages: tuple[int, int]
    window: tuple[int, int]
    sequences: list[KeptSequence]


def _owner_name(req_id: str, number: int) -> str:
    return f"{req_id}, draft {number}"

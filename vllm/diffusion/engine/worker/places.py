# SPDX-License-Identifier: Apache-2.0
"""Pages in which guesses keep the keys and values that they compute."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion.core.pages import PAGE_SIZE, num_pages
from vllm.diffusion.engine.worker.agreement import OUT_OF_MEMORY

if TYPE_CHECKING:
    from vllm.diffusion.engine.worker.canvas import Canvas
    from vllm.diffusion.engine.worker.window import Window
    from vllm.diffusion.memory import KeptSequence, PageAllocator

MAX_DRAFT_PAGES = 64  # of all requests


class Places:
    """Pages for guesses, of requests that keep keys and values.

    A forward writes the keys and values of its window, so the certain state and its guesses cannot
    have the same pages there. A place has pages of its own for the positions of one window. What
    these hold beside the window is a copy, made again for every other window: only forwards of
    other windows change it.

    Args:
        pages: the pages of all requests.
        grows: whether the store may grow for guesses.
    """

    def __init__(self, pages: PageAllocator, *, grows: bool) -> None:
        self._pages, self._grows = pages, grows
        self._held: dict[str, _Held] = {}  # by request

    def of(self, canvas: Canvas, first: int, stop: int, count: int) -> list[KeptSequence]:
        """Return at most `count` places for positions `first` to `stop` of a request.

        There are fewer where the pages for them are used up.
        """
        held = self._held.get(canvas.req_id)
        own_pages = first // PAGE_SIZE, num_pages(stop)
        if held is not None and held.own_pages != own_pages:
            self.release(canvas.req_id)
            held = None
        if held is None:
            held = self._held[canvas.req_id] = _Held(own_pages, (first, stop), [])
        num_held = len(held.places)
        names = [_place_name(canvas.req_id, number) for number in range(max(count, num_held))]
        if held.window != (first, stop):
            held.window = first, stop
            self._pages.copy_again(canvas.req_id, names[:num_held])
        if num_held < count:
            own = [range(start + first, start + stop) for start in canvas.window.kept_starts]
            room = MAX_DRAFT_PAGES - sum(len(held.places) for held in self._held.values())
            with suppress(*OUT_OF_MEMORY):
                more = names[num_held:][: max(room, 0)]
                held.places += self._pages.places(canvas.req_id, own, more, grows=self._grows)
        return held.places[:count]

    def leave(self, req_id: str, window: Window) -> None:
        """Take in the next forward of a request: what copies are of may change with it."""
        held = self._held.get(req_id)
        if held is not None and not held.window[0] <= window.first < window.stop <= held.window[1]:
            held.window = -1, -1

    def release(self, req_id: str) -> None:
        """Give back a request's places."""
        held = self._held.pop(req_id, None)
        for number in range(0 if held is None else len(held.places)):
            self._pages.release(_place_name(req_id, number))

    def release_all(self) -> None:
        """Give back all places."""
        for req_id in list(self._held):
            self.release(req_id)


@dataclass
class _Held:
    """Places of a request: for which of its pages, and for which positions."""

    own_pages: tuple[int, int]
    window: tuple[int, int]
    places: list[KeptSequence]


def _place_name(req_id: str, number: int) -> str:
    return f"{req_id}, guess {number}"

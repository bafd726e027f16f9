# SPDX-License-Identifier: Apache-2.0
"""Assigns window pages: the pages of layers with a sliding window.

Layers with a window read only the end of a context. So a page of a sequence has a window page while
some request may read it in these layers. After that the window page stays, for requests with the
same prefix, until another page needs it.

```
positions of a request     0 .......... num_kept - window + 1 ...... num_kept ...... end
pages (Paging)             |0|1|2|3|4|5|6|7|8|9|...............................|
window pages of a request              |6|7|8|9|...............................|
```

A request that continues a prefix of n tokens needs the window pages of positions
[n - window + 1, n) only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.diffusion.config import row_budget, served_model
from vllm.diffusion.core.pages import PAGE_SIZE, num_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.diffusion.core.pages import WindowLayers
    from vllm.diffusion.models.config import DiffusionConfig

# Pages of all other layers for each window page, because sequences are longer than windows.
_PAGES_PER_WINDOW_PAGE = 2
# Blocks of a sequence in progress: of the context, of the canvas, and of the next canvas.
_OPEN_BLOCKS = 3
# Requests with a draft in one step, and blocks of a draft: the finished canvas, and the next one.
MAX_DRAFTS, _DRAFT_BLOCKS = 2, 2


def window_layers(vllm_config: VllmConfig) -> WindowLayers | None:
    """Return the layers with a sliding window; None if the model has none."""
    config: DiffusionConfig = vllm_config.model_config.hf_config
    return config.window_layers(vllm_config.parallel_config.tensor_parallel_size)


def max_scratch_pages(vllm_config: VllmConfig, limit: int) -> int:
    """Return the maximum number of draft pages; `limit` for models without window pages.

    Each draft page has a window page, so there are none if the server drafts nothing.
    """
    if window_layers(vllm_config) is None:
        return limit
    if not served_model(vllm_config).defaults.get("num_speculative_states"):
        return 0
    block_length: int = vllm_config.model_config.hf_config.block_length
    return min(limit, MAX_DRAFTS * (num_pages(_DRAFT_BLOCKS * block_length) + 1))


def num_window_pages(vllm_config: VllmConfig, count: int) -> int:
    """Return the number of window pages in a store of `count` pages.

    There are enough for the largest forward of one request, and not more than all requests need.
    """
    layers = window_layers(vllm_config)
    if layers is None:
        return 0
    block_length: int = vllm_config.model_config.hf_config.block_length
    of_forward = layers.pages_of_forward(max(row_budget(vllm_config), block_length))
    of_sequence = layers.pages_of_forward(_OPEN_BLOCKS * block_length)
    of_all: int = vllm_config.scheduler_config.max_num_seqs * of_sequence
    wanted = min(-(-count // _PAGES_PER_WINDOW_PAGE), of_all)
    return min(max(wanted, of_forward), count)


@dataclass
class _Held:
    """Window pages of a request.

    Attributes:
        first: index, in the request's sequence, of the first page that has one.
        pages: the pages from there on.
    """

    first: int = 0
    pages: list[int] = field(default_factory=list)


class WindowPages:
    """Window pages of a model, and the pages that have one.

    Args:
        layers: the layers with a window.
        count: number of window pages.
    """

    def __init__(self, layers: WindowLayers, count: int) -> None:
        self.layers, self.count = layers, count
        self._free = list(range(count))[::-1]
        self._of: dict[int, int] = {}  # window page of each page that has one
        self._holders = Counter[int]()  # number of requests that need a page's window page
        # Pages whose window page no request needs, least recently used first.
        self._unused: dict[int, None] = {}
        self._held: dict[str, _Held] = {}

    @property
    def usage(self) -> float:
        """Share of the window pages that requests need."""
        return 1.0 - self._num_available / self.count

    @property
    def _num_available(self) -> int:
        return len(self._free) + len(self._unused)

    def longest_prefix(self, pages: Sequence[int]) -> int:
        """Return how many of the first pages of a prefix a request can continue.

        The pages that it reads in layers with a window have window pages.
        """
        longest, run = 0, 0  # `run` counts the last pages that all have a window page
        for count, page in enumerate(pages, start=1):
            run = run + 1 if page in self._of else 0
            if run >= count - self.layers.first_page(count * PAGE_SIZE):
                longest = count
        return longest

    def has_room(self, num_new: int, prefix: Sequence[int] = ()) -> bool:
        """Whether a request can have the window pages of a prefix, and `num_new` others."""
        num_unused = sum(page in self._unused for page in self._read_of(prefix))
        return num_new <= self._num_available - num_unused

    def _read_of(self, prefix: Sequence[int]) -> Sequence[int]:
        return prefix[self.layers.first_page(len(prefix) * PAGE_SIZE) :]

    def begin(self, req_id: str, prefix: Sequence[int]) -> list[int]:
        """Give a request without pages the window pages of its prefix, for which there is room.

        Returns:
            the window page of every page; -1 for pages that it does not read.
        """
        read = self._read_of(prefix)
        self._held[req_id] = _Held(len(prefix) - len(read))
        return [-1] * (len(prefix) - len(read)) + self.extend(req_id, read)

    def extend(self, req_id: str, pages: Sequence[int]) -> list[int]:
        """Give a request window pages for more pages of its sequence, for which there is room."""
        for page in pages:
            self._holders[page] += 1
            self._unused.pop(page, None)
        for page in pages:
            if page not in self._of:
                self._of[page] = self._free.pop() if self._free else self._taken()
        self._held[req_id].pages += pages
        return [self._of[page] for page in pages]

    def _taken(self) -> int:
        """Take the window page that was unused for the longest time."""
        page = next(iter(self._unused))
        del self._unused[page]
        return self._of.pop(page)

    def trim(self, req_id: str, num_kept: int) -> None:
        """Release window pages that a request no longer reads, given its cached positions."""
        held = self._held[req_id]
        count = self.layers.first_page(num_kept) - held.first
        if count > 0:
            self._release(held.pages[:count])
            del held.pages[:count]
            held.first += count

    def leave(self, req_id: str) -> None:
        """Release all window pages of a request."""
        held = self._held.pop(req_id, None)
        if held is not None:
            self._release(held.pages[::-1])  # the beginning of a prefix stays longest

    def _release(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._unused[page] = None


def pages_within(vllm_config: VllmConfig, positions: int, cost: float) -> int:
    """Return the number of pages that fit together with their window pages.

    Args:
        vllm_config: configuration of the engine.
        positions: number of positions of pages alone that fit.
        cost: bytes of a position in window pages, in units of a position in other pages.
    """
    count = positions // PAGE_SIZE
    while count > 1 and count + cost * num_window_pages(vllm_config, count) > positions / PAGE_SIZE:
        count -= max(1, count // 64)
    return count

# SPDX-License-Identifier: Apache-2.0
"""Assignment of window pages to the pages of sequences."""

import pytest

from vllm.diffusion.core.pages import PAGE_SIZE, WindowLayers
from vllm.diffusion.engine.scheduler.window_paging import WindowPages

HEADS = (1, 8)


def window_pages(count: int, window: int = PAGE_SIZE + 1) -> WindowPages:
    return WindowPages(WindowLayers((0,), window, HEADS, HEADS), count)


@pytest.mark.parametrize(
    ("position", "page"), [(0, 0), (64, 0), (65, 0), (127, 0), (128, 1), (129, 1), (640, 9)]
)
def test_the_first_page_that_a_row_reads(position: int, page: int) -> None:
    layers = WindowLayers((0,), 65, HEADS, HEADS)
    assert layers.first_page(position) == page


def test_pages_are_released_as_the_window_moves() -> None:
    windows = window_pages(4)
    assert windows.begin("a", []) == []
    first = windows.extend("a", [10, 11, 12, 13])
    assert sorted(first) == [0, 1, 2, 3]
    assert windows.usage == 1.0
    assert not windows.has_room(1)
    windows.trim("a", 127)
    assert windows.usage == 1.0
    windows.trim("a", 128)
    assert windows.usage == 0.75
    assert windows.has_room(1)
    assert windows.extend("a", [14]) == first[:1]
    windows.leave("a")
    assert windows.usage == 0.0


def test_a_prefix_ends_where_its_window_pages_end() -> None:
    """A prefix of n pages is read from position 64 n - 64, that is, in its last page."""
    windows = window_pages(5)
    windows.begin("a", [])
    windows.extend("a", [20, 21, 22, 23, 24])
    windows.leave("a")
    pages = [20, 21, 22, 23, 24, 25]
    assert windows.longest_prefix(pages) == 5
    assert windows.longest_prefix(pages[:2]) == 2
    windows.begin("b", [])
    windows.extend("b", [30, 31])  # takes those of the last pages
    assert windows.longest_prefix(pages) == 3
    assert windows.longest_prefix([90, *pages]) == 4
    assert windows.longest_prefix([90, 91, 92]) == 0


def test_window_pages_are_shared() -> None:
    windows = window_pages(4)
    windows.begin("a", [])
    given = windows.extend("a", [40, 41])
    assert windows.begin("b", [40, 41]) == [-1, given[1]]
    windows.leave("a")
    assert windows.usage == 0.25
    assert windows.has_room(3)
    assert not windows.has_room(4)
    windows.leave("b")
    # The prefix of another request is not taken for its own new pages.
    assert windows.has_room(3, [40, 41])
    assert not windows.has_room(4, [40, 41])


def test_the_window_page_of_a_page_with_new_contents_is_used_again() -> None:
    windows = window_pages(2)
    windows.begin("a", [])
    given = windows.extend("a", [50, 51])
    windows.leave("a")
    windows.begin("b", [])
    assert windows.extend("b", [51, 60]) == [given[1], given[0]]


def test_a_request_may_leave_twice() -> None:
    windows = window_pages(2)
    windows.begin("a", [])
    windows.extend("a", [1])
    windows.leave("a")
    windows.leave("a")
    assert windows.usage == 0.0

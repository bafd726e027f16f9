# SPDX-License-Identifier: Apache-2.0
"""How kept keys and values are counted: in whole pages."""

# Positions of a page. A multiple of the keys that attention reads at a time (`SplitConfig.keys`),
# so that all of them lie in one page.
PAGE_SIZE = 64

# Widths of heads whose keys `split_attention` reads in their pages, in 16 bits on a GPU. Else the
# keys of a sequence are copied to one range of rows before they are read.
HEAD_DIMS = (16, 32, 64, 128)


def num_pages(positions: int) -> int:
    """Pages that so many positions of one sequence take."""
    return -(-positions // PAGE_SIZE)


def in_whole_pages(positions: int) -> int:
    """Positions of the pages that so many positions of one sequence take."""
    return num_pages(positions) * PAGE_SIZE

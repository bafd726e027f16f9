# SPDX-License-Identifier: Apache-2.0
"""Pages: the unit in which kept keys and values are counted."""

# Positions of a page. A multiple of the keys that attention reads at a time (`SplitConfig.keys`),
# so that all of them lie in one page.
PAGE_SIZE = 64
PAGE_ROWS = 2 * PAGE_SIZE  # of a page in one layer: its keys, then its values
PARTS = 8  # of the layers: while pages move, the layers of one part lie there twice

# Widths of heads whose keys `split_attention` reads in their pages, in 16 bits on a GPU. Else the
# keys of a sequence are copied to one range of rows before they are read.
HEAD_DIMS = (16, 32, 64, 128)


def num_pages(positions: int) -> int:
    """Number of pages for `positions` positions of one sequence."""
    return -(-positions // PAGE_SIZE)


def part_layers(num_layers: int) -> int:
    """Most layers of one part."""
    return -(-num_layers // PARTS)


def in_whole_pages(positions: int) -> int:
    """Number of positions in the pages for `positions` positions of one sequence."""
    return num_pages(positions) * PAGE_SIZE

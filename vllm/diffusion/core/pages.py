# SPDX-License-Identifier: Apache-2.0
"""Pages: the unit in which kept keys and values are allocated."""

from typing import NamedTuple

# Positions of a page. The size is a multiple of the tile of keys that attention reads
# (`SplitConfig.keys`), so that a tile lies within one page.
PAGE_SIZE = 64
PAGE_ROWS = 2 * PAGE_SIZE  # rows of a page in one layer: keys, then values
PARTS = 8  # parts of the layers; while pages move, one part is stored twice

# Head widths for which `split_attention` reads 16-bit keys in their pages on a GPU. For other
# widths, the keys of a sequence are copied to consecutive rows before they are read.
HEAD_DIMS = (16, 32, 64, 128, 256, 512)


def num_pages(positions: int) -> int:
    """Return the number of pages for `positions` positions of one sequence."""
    return -(-positions // PAGE_SIZE)


def part_layers(num_layers: int) -> int:
    """Return the maximum number of layers in one part."""
    return -(-num_layers // PARTS)


def in_whole_pages(positions: int) -> int:
    """Return the number of positions in the pages for `positions` positions of one sequence."""
    return num_pages(positions) * PAGE_SIZE


class WindowLayers(NamedTuple):
    """Layers whose rows read a window of their context only, and so need few pages.

    Attributes:
        indices: indices of these layers.
        window: number of keys that a row of the context reads, its own included.
        heads: number and width of these layers' key/value heads on one rank.
        other_heads: the same for all other layers.
    """

    indices: tuple[int, ...]
    window: int
    heads: tuple[int, int]
    other_heads: tuple[int, int]

    def first_page(self, position: int) -> int:
        """Return the index of the first page that a row of the context at `position` reads."""
        return max(position - self.window + 1, 0) // PAGE_SIZE

    def pages_of_forward(self, num_rows: int) -> int:
        """Return the maximum number of pages of the keys that a forward of `num_rows` rows reads.

        The first and the last page may be read in part.
        """
        return num_pages(self.window - 1 + num_rows) + 1

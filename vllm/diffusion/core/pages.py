# SPDX-License-Identifier: Apache-2.0
"""Pages: the unit in which kept keys and values are allocated."""

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

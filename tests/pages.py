# SPDX-License-Identifier: Apache-2.0
"""Keys and values in the pages of a store, for tests of attention."""

import torch

from vllm.diffusion.core.spans import PageTable
from vllm.diffusion.memory import ActivationPool, KeptSequence, PageAllocator, PageStore

NUM_LAYERS, LAYER = 3, 1  # layers of the store, and the layer that is read
NO_PAGES = PageTable(torch.empty(0, dtype=torch.int32), 64)


def in_pages(
    k: torch.Tensor, v: torch.Tensor, size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, PageTable]:
    """Put the rows of k and v into pages of `size` rows, shuffled among the same number of others.

    Args:
        k, v: [N, KV, hd].
        size: rows per page.
        seed: determines the order of the pages.

    Returns:
        k and v of the store, [M, KV, hd], with NaN in all other rows, and the table of pages.
    """
    num_pages = -(-len(k) // size)
    pages = k.new_full((2 * num_pages, NUM_LAYERS, 2, size, *k.shape[1:]), torch.nan)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(2 * num_pages, generator=generator)[:num_pages].to(k.device)
    for number, rows in enumerate((k, v)):
        whole = torch.cat(
            [rows, rows.new_full((num_pages * size - len(k), *k.shape[1:]), torch.nan)]
        )
        pages[order, LAYER, number] = whole.unflatten(0, (num_pages, size))
    rows = pages.flatten(0, 3)
    table = PageTable((order * 2 * NUM_LAYERS * size).int(), size)
    return rows[2 * LAYER * size :], rows[(2 * LAYER + 1) * size :], table


def store_with(*lengths: int, head_dim: int = 4) -> tuple[PageStore, list[KeptSequence]]:
    """Return a float32 store with sequences of these lengths, after pages of another one."""
    pool = ActivationPool(1 << 30, torch.device("cpu"))
    store = PageStore(2, 1, head_dim, torch.float32, pool)
    pages = PageAllocator(store, pool)
    pages.allocate("another", 70)
    return store, [pages.allocate(str(i), length) for i, length in enumerate(lengths)]

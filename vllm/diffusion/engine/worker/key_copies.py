# SPDX-License-Identifier: Apache-2.0
"""Copies of keys and values, for items of a step that read keys of another item's rows.

A layer stores the keys of such rows in the pages of several items.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.diffusion.engine.worker.batch import Packing
    from vllm.diffusion.ops import Array


def copy_slots_of(packing: Packing) -> Array:
    """Return the slots of copies, as in `StepInputs`, for items with a `context`, at least one."""
    items = packing.items
    copying = [i for i, item in enumerate(items) if item.window.context is not None]
    first_rows = dict[int, int]()  # first row of each item
    for (index, _, first, stop), end in zip(packing.sources, packing.ends.tolist(), strict=True):
        first_rows.setdefault(index, end - (stop - first))
    counts = np.zeros(packing.ends[-1], dtype=np.int64)  # copies of each row so far
    copies = np.full((len(copying), counts.size), -1)
    for index in copying:
        window = items[index].window
        assert window.cache is not None and window.context is not None
        context = items.index(window.context)
        first, stop = packing.windows[context].first, packing.windows[index].first
        rows, kept_start = first_rows[context] + np.arange(stop - first), window.kept_starts[0]
        copies[counts[rows], rows] = window.cache.slots[kept_start + first : kept_start + stop]
        counts[rows] += 1
    return np.ascontiguousarray(copies[: counts.max(), -packing.slot_mapping.size :])

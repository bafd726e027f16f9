# SPDX-License-Identifier: Apache-2.0
"""Positions of a text's tokens when masks are added to it, or tokens are removed."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]


def with_slack(masked: Array, slack: int, stop: int, size: int) -> Array:
    """Return the sources of a text with `slack` masks added behind every run of masked tokens.

    If there is no room for all masks, later runs get fewer.

    Args:
        masked: [K] int64, ascending positions of the tokens that are masked again.
        slack: number of masks.
        stop: end of the text; the positions after it make room.
        size: number of positions.

    Returns:
        [size] int64: the previous position of each position; -1 for an added mask.
    """
    ends = masked[np.append(np.diff(masked) > 1, masked.size > 0)] + 1
    room = np.maximum(size - stop - slack * np.arange(ends.size), 0)
    added = np.minimum(slack, room)
    return np.insert(np.arange(size), np.repeat(ends, added), -1)[:size]


def without(is_removed: Array) -> Array:
    """Return the sources [size] of a text without some of its positions.

    Args:
        is_removed: [size] bool.

    Returns:
        [size] int64: the previous position of each position; -1 at the end.
    """
    kept = (~is_removed).nonzero()[0]
    return np.pad(kept, (0, is_removed.size - kept.size), constant_values=-1)

# SPDX-License-Identifier: Apache-2.0
"""Philox4x32-10 in plain Python integers, or arrays of them.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)

Counter = tuple[Any, Any, Any, Any]  # int, or uint64 arrays
Key = tuple[int, int]


def philox4x32(counter: Counter, key: Key, rounds: int = 10) -> Counter:
    """Four 32-bit random words for a counter of four and a key of two 32-bit words.

    Words of the counter may be uint64 arrays that broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        product0 = MULTIPLIERS[0] * c0
        product1 = MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & WORD,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & WORD,
        )
        k0 = (k0 + KEY_INCREMENTS[0]) & WORD
        k1 = (k1 + KEY_INCREMENTS[1]) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, purpose: int, step: int, position: int, column: int) -> float:
    """The number in (0, 1) of one (purpose, step, position, column) of a request.

    The 64-bit seed is the key, low word first; the counter is (purpose, step, position,
    column // 4) and the column picks one of the four words: U = (word + 0.5) / 2^32.
    """
    key = (seed & WORD, (seed >> 32) & WORD)
    words = philox4x32((purpose, step, position & WORD, column // 4), key)
    return (words[column % 4] + 0.5) / 2.0**32


def uniform_matrix(
    seed: int, purpose: int, step: int, positions: Iterable[int], num_columns: int
) -> torch.Tensor:
    """`uniform` for every position and column: float64 [len(positions), num_columns]."""
    key = (seed & WORD, (seed >> 32) & WORD)
    rows = np.array([position & WORD for position in positions], dtype=np.uint64)[:, None]
    quads = np.arange((num_columns + 3) // 4, dtype=np.uint64)
    words = np.stack(np.broadcast_arrays(*philox4x32((purpose, step, rows, quads), key)), axis=-1)
    columns = words.reshape(len(rows), 4 * len(quads))[:, :num_columns]
    return torch.from_numpy((columns.astype(np.float64) + 0.5) / 2.0**32)

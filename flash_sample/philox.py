# SPDX-License-Identifier: Apache-2.0
"""Counter-based random numbers: Philox4x32-10 in plain integer arithmetic.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A number is a
function of its counter and key alone, so it does not depend on the device, the batch, the chunk,
the tile or the rank.

The key is a request's 64-bit seed, low word first. The counter is (purpose, step, canvas position,
column // 4), and column % 4 selects one of the four words of the result. int64 tensors hold the
32-bit words; int64 products wrap, so their low 64 bits are exact.
"""

from typing import TypeAlias

import torch
from torch import Tensor

Word: TypeAlias = int | Tensor  # a 32-bit word, or an int64 tensor of them

TOKEN_NOISE = 0  # Purpose of the noise added to logits; other draws use other purposes.

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encrypt a counter under a key with ten rounds.

    Args:
        counter: Four words, each an int or an int64 tensor; tensors broadcast.
        key: Two words, likewise.

    Returns:
        Four int64 tensors of 32-bit words, of the broadcast shape.
    """
    c0, c1, c2, c3 = (torch.as_tensor(word) for word in counter)
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            _high(product1) ^ c1 ^ k0,
            product1 & _WORD,
            _high(product0) ^ c3 ^ k1,
            product0 & _WORD,
        )
        k0 = (k0 + _KEY_STEPS[0]) & _WORD
        k1 = (k1 + _KEY_STEPS[1]) & _WORD
    return (
        c0,
        c1,
        c2,
        c3,
        # After ten rounds every word depends on all inputs, and has their broadcast shape.
    )


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _WORD


def uniform(
    seed: int | Tensor,
    purpose: int,
    step: int | Tensor,
    positions: Tensor,
    columns: int | tuple[int, int],
) -> Tensor:
    """Generate uniform numbers in the open interval (0, 1), one for each row and column.

    Args:
        seed: 64-bit key of the request; an int, or int64 [R] (its bit pattern) for rows of
            different requests.
        purpose: Purpose of the numbers; draws of different purposes are independent.
        step: Denoising step, an int or int64 [R].
        positions: int64 [R], canvas position of each row.
        columns: Number of columns, from 0; or the half-open range (first, end) of columns.

    Returns:
        float64 [R, C] on the device of ``positions``: U = (x + 0.5) / 2^32 with x the 32-bit word.

    Raises:
        ValueError: ``positions`` is not [R] int64, or the range of columns is not ascending.
    """
    if positions.dim() != 1 or positions.dtype != torch.int64:
        raise ValueError(
            f"uniform: positions must be int64 [R], got {positions.dtype} {list(positions.shape)}"
        )
    first, end = (0, columns) if isinstance(columns, int) else columns
    if not 0 <= first <= end:
        raise ValueError(f"uniform: columns must satisfy 0 <= first <= end, got {columns}")
    first_group = first // 4
    groups = torch.arange(first_group, (end + 3) // 4, device=positions.device)
    words = philox4x32(
        (purpose & _WORD, _rows(step, 0), (positions & _WORD)[:, None], groups[None, :]),
        (_rows(seed, 0), _rows(seed, 32)),
    )
    numbers = torch.stack(words, dim=-1).flatten(1)[:, first - 4 * first_group :][:, : end - first]
    return (numbers.to(torch.float64) + 0.5) * 2.0**-32


def _rows(value: int | Tensor, shift: int) -> Word:
    """Return the 32-bit word of ``value`` above bit ``shift``; a tensor [R] gives [R, 1]."""
    if isinstance(value, int):
        return (value >> shift) & _WORD
    return ((value >> shift) & _WORD)[:, None]

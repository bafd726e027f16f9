# SPDX-License-Identifier: Apache-2.0
"""The integer Philox against the known answers published with Random123 (kat_vectors)."""

from __future__ import annotations

import pytest
import torch

from tests.reference.philox import Counter, Key, philox4x32, uniform, uniform_matrix

ZEROS = (0, 0, 0, 0)
ONES = (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "rounds", "words"),
    [
        (ZEROS, (0, 0), 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (ONES, ONES[:2], 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
        (ZEROS, (0, 0), 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ],
)
def test_known_answers(counter: Counter, key: Key, rounds: int, words: Counter) -> None:
    assert philox4x32(counter, key, rounds) == words


def test_uniform_takes_the_word_of_its_column() -> None:
    seed = (0x299F31D0 << 32) | 0xA4093822
    words = (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    for lane, word in enumerate(words):
        value = uniform(seed, PI[0], PI[1], PI[2], 4 * PI[3] + lane)
        assert value == (word + 0.5) / 2**32


def test_uniform_matrix_equals_single_numbers() -> None:
    matrix = uniform_matrix(7, 1, 2, [0, 5, 31], 10)
    single = [[uniform(7, 1, 2, p, c) for c in range(10)] for p in (0, 5, 31)]
    assert matrix.dtype == torch.float64
    assert matrix.tolist() == single


def test_uniform_matrix_of_no_positions() -> None:
    assert uniform_matrix(7, 1, 2, [], 10).shape == (0, 10)

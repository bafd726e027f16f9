# SPDX-License-Identifier: Apache-2.0
"""Philox: published vectors, addressing, and the distribution of the numbers."""

import pytest
import torch

from flash_sample.philox import philox4x32, uniform
from tests.native.support import chi_square_limit

WORD = 0xFFFFFFFF


# Known-answer vectors of philox4x32_10 in Random123 (kat_vectors), by its authors.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (WORD, WORD, WORD, WORD),
            (WORD, WORD),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, words):
    assert tuple(int(word) for word in philox4x32(counter, key)) == words


def test_uniform_addresses_purpose_step_position_column():
    seed, purpose, step = 0x123456789ABCDEF0, 3, 17
    positions = torch.tensor([0, 5, 4_000_000_000])
    numbers = uniform(seed, purpose, step, positions, 11)
    assert numbers.dtype == torch.float64 and numbers.shape == (3, 11)
    for row, position in enumerate(positions.tolist()):
        for column in range(11):
            counter = (purpose, step, position, column // 4)
            word = int(philox4x32(counter, (0x9ABCDEF0, 0x12345678))[column % 4])
            assert numbers[row, column].item() == (word + 0.5) / 2**32


def test_range_of_columns_is_a_slice():
    positions = torch.arange(4)
    whole = uniform(7, 0, 2, positions, 40)
    for first, end in [(0, 0), (0, 3), (3, 9), (4, 8), (39, 40), (13, 13)]:
        assert torch.equal(uniform(7, 0, 2, positions, (first, end)), whole[:, first:end])


def test_rows_may_have_their_own_seed_and_step():
    seeds, steps = [5, -1, 2**63 - 1], [0, 9, 1]
    positions = torch.tensor([8, 8, 1])
    together = uniform(torch.tensor(seeds), 1, torch.tensor(steps), positions, 10)
    for row, (seed, step) in enumerate(zip(seeds, steps, strict=True)):
        alone = uniform(seed & (2**64 - 1), 1, step, positions[row : row + 1], 10)
        assert torch.equal(together[row : row + 1], alone)


def test_no_rows():
    assert uniform(1, 0, 0, torch.empty(0, dtype=torch.int64), 5).shape == (0, 5)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match=r"positions must be int64 \[R\], got torch.float32"):
        uniform(1, 0, 0, torch.zeros(3), 5)
    with pytest.raises(ValueError, match="columns must satisfy"):
        uniform(1, 0, 0, torch.arange(3), (5, 2))


@pytest.mark.parametrize("seed", [0, 12345, 2**64 - 1])
def test_numbers_are_uniform(seed):
    numbers = uniform(seed, 0, 3, torch.arange(64), 4096).flatten()
    assert numbers.min() > 0 and numbers.max() < 1
    counts = torch.histc(numbers, bins=256, min=0, max=1)
    expected = numbers.numel() / 256
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(255)


@pytest.mark.parametrize("axis", ["purpose", "step", "position", "column", "seed"])
def test_neighbouring_counters_are_independent(axis):
    """Pairs of numbers whose counters differ by one fill the unit square evenly."""
    size, positions = 4096, torch.arange(16)
    first = uniform(9, 0, 0, positions, size)
    second = {
        "purpose": lambda: uniform(9, 1, 0, positions, size),
        "step": lambda: uniform(9, 0, 1, positions, size),
        "position": lambda: uniform(9, 0, 0, positions + 1, size),
        "column": lambda: uniform(9, 0, 0, positions, (1, size + 1)),
        "seed": lambda: uniform(10, 0, 0, positions, size),
    }[axis]()
    cells = (first * 16).long() * 16 + (second * 16).long()
    counts = torch.bincount(cells.flatten(), minlength=256).double()
    expected = first.numel() / 256
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(255)


@pytest.mark.gpu
def test_gpu_gives_the_same_numbers():
    positions = torch.tensor([0, 77, 2**31, 2**32 - 1])
    seeds = torch.tensor([1, -5, 2**62, 0])
    cpu = uniform(seeds, 2, 40, positions, (5, 999))
    gpu = uniform(seeds.cuda(), 2, 40, positions.cuda(), (5, 999))
    assert torch.equal(cpu, gpu.cpu())

# SPDX-License-Identifier: Apache-2.0
"""The maskings of a likelihood estimate, and the estimate from their log probabilities."""

import math
from collections import Counter

import pytest
import torch

from vllm.diffusion.api.likelihood.estimator import draw_maskings, estimate


def published(length: int, mc_num: int, batch_size: int, seed: int) -> list[tuple[int, ...]]:
    """Return the maskings of the published loop, which uses the global generator."""
    torch.manual_seed(seed)
    results = []
    for _ in range(mc_num // batch_size):
        k = torch.randint(1, length + 1, ())
        x = torch.round(
            torch.linspace(float(k), k + (batch_size - 1) * (length / batch_size), batch_size)
        ).long()
        x = ((x - 1) % length) + 1
        is_mask = torch.arange(length).repeat(batch_size, 1) < x.unsqueeze(1)
        for row in is_mask:
            results.append(tuple(row[torch.randperm(length)].nonzero()[:, 0].tolist()))
    return results


@pytest.mark.parametrize("length", [1, 2, 3, 7, 32, 77])
@pytest.mark.parametrize("seed", [0, 1234, -3])
def test_maskings_are_those_of_the_published_script(length: int, seed: int) -> None:
    assert draw_maskings(length, 96, 32, seed) == published(length, 96, 32, seed)


def test_every_number_of_masks_is_as_likely() -> None:
    counts = Counter(len(m) for seed in range(200) for m in draw_maskings(5, 8, 8, seed))
    assert set(counts) == {1, 2, 3, 4, 5}
    for count in counts.values():  # 1600 draws, about 320 each
        assert abs(count - 320) < 5 * math.sqrt(320)


def test_an_estimate_weighs_by_the_number_of_masks() -> None:
    logprobs = {(0,): [-1.0], (0, 1): [-2.0, -4.0], (0, 1, 2): [-1.0, -1.0, -1.0]}
    actual = estimate([(0,), (0, 1), (0, 1, 2), (0,)], logprobs, length=3)
    samples = [-3.0, -9.0, -3.0, -3.0]
    mean = sum(samples) / 4
    spread = math.sqrt(sum((s - mean) ** 2 for s in samples) / 3)
    assert actual == (mean, pytest.approx(spread / 2))


@pytest.mark.parametrize(("length", "stderr"), [(1, 0.0), (2, None)])
def test_one_sample_says_nothing_of_its_error_unless_it_is_exact(
    length: int, stderr: float | None
) -> None:
    assert estimate([(0,)], {(0,): [-0.5]}, length).stderr == stderr

# SPDX-License-Identifier: Apache-2.0
"""The random numbers of a request, by flash_sample; tests/native/test_philox has known answers."""

from collections.abc import Iterable

import torch

from flash_sample.philox import uniform


def uniform_matrix(
    seed: int, purpose: int, step: int, positions: Iterable[int], num_columns: int
) -> torch.Tensor:
    """Return float64 numbers in (0, 1) of positions and columns, [len(positions), num_columns]."""
    rows = torch.tensor(list(positions), dtype=torch.int64)
    return uniform(seed, purpose, step, rows, num_columns)

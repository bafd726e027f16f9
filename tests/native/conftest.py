# SPDX-License-Identifier: Apache-2.0
"""Skips tests that need a GPU on machines without one."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.fixture
def generator() -> torch.Generator:
    """Return a CPU generator that gives the same numbers in every run."""
    return torch.Generator().manual_seed(20250920)

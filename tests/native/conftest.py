# SPDX-License-Identifier: Apache-2.0
"""Skips what needs a GPU where there is none."""

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
    """Numbers on the CPU, the same in every run."""
    return torch.Generator().manual_seed(20250920)

# SPDX-License-Identifier: Apache-2.0
"""A single rank without process groups, for all tests of sampling."""

import pytest

from vllm.diffusion.ops import sampling


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "get_tensor_model_parallel_world_size", lambda: 1)

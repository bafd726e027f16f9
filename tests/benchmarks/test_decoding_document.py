# SPDX-License-Identifier: Apache-2.0
"""docs/decoding.md says something about everything that a request can choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm.diffusion import params

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "decoding.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", (*params.ALGORITHMS, *params.CACHES))
def test_algorithms_and_caches_have_a_row(name: str) -> None:
    assert f"\n| `{name}` |" in TEXT


@pytest.mark.parametrize("name", [spec.name for spec in params.FIELDS if spec.algorithms])
def test_parameters_of_single_algorithms_are_named(name: str) -> None:
    assert f"`{name}`" in TEXT

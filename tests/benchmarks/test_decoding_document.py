# SPDX-License-Identifier: Apache-2.0
"""docs/decoding.md says something about everything that a request can choose."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm.diffusion import fields
from vllm.diffusion.algorithms import (
    ALGORITHMS,
    BLOCK_ALGORITHMS,
    Algorithm,
    documented_algorithms,
)
from vllm.diffusion.families import FAMILIES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "decoding.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", [ALGORITHMS, BLOCK_ALGORITHMS], ids=["full", "block"])
def test_the_tables_of_algorithms_are_those_of_their_records(table: dict[str, Algorithm]) -> None:
    is_block_causal = table is BLOCK_ALGORITHMS
    families = [family for family in FAMILIES if family.is_block_causal == is_block_causal]
    default_of = {family.name: family.default_algorithm for family in families}
    assert set(default_of.values()) <= set(table)
    rows = "\n".join(documented_algorithms(table, default_of))
    assert f"\n|---|---|---|---|---|\n{rows}\n\n" in TEXT, f"wanted in the document:\n{rows}"


@pytest.mark.parametrize("name", fields.CACHES)
def test_caches_have_a_row(name: str) -> None:
    assert f"\n| `{name}` |" in TEXT


@pytest.mark.parametrize(
    "name",
    [spec.name for spec in fields.FIELDS if spec.algorithms or spec.block_algorithms],
)
def test_parameters_of_single_algorithms_are_named(name: str) -> None:
    assert f"`{name}`" in TEXT

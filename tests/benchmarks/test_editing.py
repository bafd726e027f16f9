# SPDX-License-Identifier: Apache-2.0
"""The benchmark of revised texts, at tiny widths."""

import json
from pathlib import Path

import pytest

from benchmarks import editing

pytestmark = pytest.mark.usefixtures("quick_starts")

SCALE = ("--num-layers", "2", "--shrink", "16", "--dtype", "float32", "--rounds", "1")
SIZES = ("--context", "10", "--tokens", "64", "--block-length", "16", "--steps", "4")


@pytest.mark.parametrize(
    ("family", "passes"),
    [
        ("llada", {"unchanged": 1, "block": 4, "spread": 1 + 4, "generated": 32}),
        ("llada2", {"unchanged": 1, "block": 1 + 4 + 1, "generated": 35}),
    ],
)
def test_passes_follow_the_changes(family: str, passes: dict[str, int], tmp_path: Path) -> None:
    output = ("--output-dir", str(tmp_path))
    assert editing.main(["--family", family, *SCALE, *SIZES, *output]) == 0
    rows = {row["case"]: row for row in json.loads((tmp_path / "editing.json").read_text())["rows"]}
    assert {name: row["num_forwards"] for name, row in rows.items()} == passes
    assert all(row["ms"] > 0 for row in rows.values()) and rows["generated"]["share"] == 1.0

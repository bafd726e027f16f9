# SPDX-License-Identifier: Apache-2.0
"""The benchmark that counts the errors of texts which a revision repairs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import repairs
from benchmarks.repairs import Draft

ANSWER = [1, 2, 3, 4, 5]


def result(tmp_path: Path, *options: str) -> dict[str, dict[str, Any]]:
    """Run the benchmark on few drafts; return its rows by the kind of errors."""
    assert repairs.main(["--drafts", "12", "--output-dir", str(tmp_path), *options]) == 0
    rows = json.loads((tmp_path / "repairs.json").read_text())["rows"]
    return {row["errors"]: row for row in rows}


def test_a_trained_model_repairs_wrong_tokens(tmp_path: Path) -> None:
    row = result(tmp_path, "--errors", "random")["random"]
    assert row["repaired"] > 0.9
    assert row["changed"] < 0.02
    assert row["passes"] > 1
    (kept,) = result(tmp_path, "--errors", "random", "--parameters", '{"noise": 0}').values()
    assert (kept["repaired"], kept["changed"], kept["right"], kept["passes"]) == (0, 0, 0, 1)


def test_slack_repairs_missing_and_added_tokens(tmp_path: Path) -> None:
    fields = '{"slack": 3, "edit_rounds": 3}'
    rows = result(tmp_path, "--errors", "missing", "added", "--parameters", fields)
    for row in rows.values():
        assert row["repaired"] > 0.9
        assert row["changed"] < 0.02


@pytest.mark.parametrize(
    ("kind", "places", "revised", "num_repaired", "num_changed"),
    [
        ("random", [1, 3], [1, 2, 3, 9, 5], 1, 0),
        ("random", [1], [1, 2, 3, 9, 8], 1, 2),
        ("missing", [0, 2], [1, 2, 4, 5], 1, 0),
        ("missing", [2], [1, 2, 3, 4, 5, 9], 1, 0),
        ("added", [0, 2], [1, 2, 9, 3, 4, 5], 1, 0),
        ("added", [4], [1, 2, 3, 4, 5], 1, 0),
        ("added", [4], [1, 2, 4, 5], 1, 1),
    ],
)
def test_repairs_are_counted_in_the_aligned_answer(
    kind: str, places: list[int], revised: list[int], num_repaired: int, num_changed: int
) -> None:
    draft = Draft([], [], ANSWER, places)
    assert repairs.repair_of(draft, kind, revised) == (num_repaired, num_changed)


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        repairs.main(["--errors", "swapped"])
    assert "invalid choice: 'swapped'" in capsys.readouterr().err

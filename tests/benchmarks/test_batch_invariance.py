# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of batch invariance, at tiny widths."""

import json
from pathlib import Path

import pytest

from benchmarks import batch_invariance, same_answers

pytestmark = pytest.mark.usefixtures("quick_starts")

SCALE = ("--num-layers", "2", "--shrink", "16", "--dtype", "float32")


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_are_timed_with_and_without(ranks: int, tmp_path: Path) -> None:
    cases = ("--requests", "1", "3", "--rows", "12", "4", "--turns", "1", "--rounds", "2")
    options = [*SCALE, *cases, "--tensor-parallel-size", str(ranks), "--output-dir", str(tmp_path)]
    assert batch_invariance.main(options) == 0
    rows = json.loads((tmp_path / "batch_invariance.json").read_text())["rows"]
    assert [(row["num_requests"], row["num_rows"]) for row in rows] == [(1, 12), (3, 12)]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["invariant_ms"] / row["usual_ms"])
        assert row["spread"] == 1


def test_a_case_needs_both_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        batch_invariance.main(["--requests", "1", "2", "--rows", "32"])
    assert "wanted a number of each for every case" in capsys.readouterr().err


def test_answers_stay_the_same(tmp_path: Path) -> None:
    sizes = ("--prompts", "2", "--states", "2", "--context", "6", "--gen-length", "8")
    options = [*SCALE, *sizes, "--batch-invariant", "--output-dir", str(tmp_path)]
    assert same_answers.main(options) == 0
    rows = json.loads((tmp_path / "same_answers.json").read_text())["rows"]
    assert [(row["run"], row["answers"], row["tokens"]) for row in rows] == [
        ("beside", 1.0, 1.0),
        ("guesses", 1.0, 1.0),
    ]

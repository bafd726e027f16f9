# SPDX-License-Identifier: Apache-2.0
"""The command that runs the benchmarks of one part of the page."""

import shlex
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import reproduce

LINES = [line for part in reproduce.PARTS.values() for line in part]


@pytest.mark.parametrize("line", dict.fromkeys(LINES))
def test_benchmarks_take_the_options(line: str) -> None:
    words = [word for word in shlex.split(line) if not reproduce.SETTING.match(word)]
    benchmark = import_module(f"benchmarks.{words[0].removesuffix('.py')}")
    benchmark.parse_arguments(words[1:])


def test_what_fails_keeps_nothing_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("missing.py", "performance_tables.py --help")
    monkeypatch.setattr(reproduce, "PARTS", {"both": lines})
    assert reproduce.main(["both", "--output-dir", str(tmp_path)]) == 1
    reports = [line.split()[3:5] for line in capsys.readouterr().out.splitlines()[1:3]]
    assert reports == [["failed", "2"], ["good", "performance_tables.py"]]
    tables = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert "## 01-both" in tables
    assert "FILE" in tables.partition("## 02-both")[2]


def test_what_has_no_time_is_not_started(tmp_path: Path) -> None:
    ended = reproduce.main(["rollouts", "--minutes", "1e-9", "--output-dir", str(tmp_path)])
    assert ended == 1
    assert [path.name for path in tmp_path.iterdir()] == ["tables.md"]


def test_unknown_parts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce.main(["nothing"]) == 1
    assert "PART: given nothing; wanted floors, guesses" in capsys.readouterr().err

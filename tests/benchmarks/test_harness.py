# SPDX-License-Identifier: Apache-2.0
"""The parts that benchmarks share: options, tables, and reports of failures."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import BenchmarkError, Parser, Table, positive


def test_options_take_what_their_defaults_are(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser("name", "About.\n\n    an example")
    parser.option("--lengths", (32, 64), "rows")
    parser.option("--seed", 0, "of the lengths")
    parser.option("--words", (), "some")
    parser.option("--quick", False, "less")
    parser.option("--count", 4, type=positive)
    plain = parser.parse_args([])
    assert (plain.lengths, plain.seed, plain.words, plain.quick) == ((32, 64), 0, (), False)
    assert plain.output_dir == harness.ROOT / "results" / "name"
    given = parser.parse_args(["--lengths", "1", "2", "--words", "a", "--quick", "--seed", "7"])
    assert (given.lengths, given.seed, given.words, given.quick) == ([1, 2], 7, ["a"], True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--count", "0"])
    assert "given 0; wanted at least 1" in capsys.readouterr().err
    output = parser.format_help()
    assert "    an example" in output and "of the lengths (default: 0)" in output
    assert "less (default" not in output and "some (default" not in output


def test_a_family_or_a_checkpoint() -> None:
    parser = Parser("name", None)
    parser.shape(None, takes_model=True)
    for wrong in ([], ["--family", "llada", "--model", "x"], ["--family", "unheard-of"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
    options = parser.parse_args(["--family", "llada", "--num-layers", "1", "--shrink", "16"])
    assert harness.configuration_of(options)["n_layers"] == 1
    with harness.checkpoint_of(options) as folder:
        assert (folder / "config.json").is_file()
    assert not folder.exists()
    with harness.checkpoint_of(parser.parse_args(["--model", "here"])) as folder:
        assert folder == Path("here").resolve()


@dataclass(frozen=True)
class Row:
    name: str
    time_ms: float | None
    is_fused: bool


def test_rows_are_printed_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table({"name": "<6", "ms": ">7.2f", "fused": ">5"}, "name time_ms is_fused", total=2)
    table.add(Row("a", 1.234, True))
    assert capsys.readouterr().out == "name        ms fused\na         1.23   yes\n"
    table.add(Row("b", None, False))
    table.note("a note")
    assert capsys.readouterr().out == "b            -    no\na note\n"
    assert [row.name for row in table.rows] == ["a", "b"]
    assert table.line(Row("c", 10.0, False)) == Table(table.columns).line(["c", 10.0, False])


def test_what_cannot_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @harness.command
    def main(error: BaseException | None) -> int | None:
        if error is not None:
            raise error
        return None

    assert main(None) == 0
    for error in (BenchmarkError("no model"), OSError("no disk"), KeyboardInterrupt()):
        assert main(error) == 1
    reports = ["error: no model", "error: no disk", "error: interrupted"]
    assert capsys.readouterr().err.splitlines() == reports
    with pytest.raises(KeyError):
        main(KeyError("a mistake"))

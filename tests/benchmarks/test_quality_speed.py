# SPDX-License-Identifier: Apache-2.0
"""The benchmark of quality and speed: its cases, its counts, and its output."""

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.diffusion.request.algorithms import ALGORITHMS, CACHES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import quality_speed  # noqa: E402
from quality_speed import Refused, Row, cases, measure  # noqa: E402

from benchmarks.harness import read_facts  # noqa: E402

LLADA = ROOT / "models" / "llada-tiny"
IDENTITY = ("m", "taught", "threshold", "none", "defaults")
FACTS = [("What is 1 plus 1?", "1 plus 1 is 2."), ("What is 1 plus 2?", "1 plus 2 is 3.")]


# --- cases -----------------------------------------------------------------------------------


def test_every_algorithm_and_cache_has_a_case() -> None:
    plan = cases(ALGORITHMS, CACHES, 32, 8)
    assert {case.algorithm for case in plan} == set(ALGORITHMS)
    assert {(case.algorithm, case.cache) for case in plan} == {
        (algorithm, cache) for algorithm in ALGORITHMS for cache in CACHES
    }
    reports = [(case.algorithm, case.cache, case.label()) for case in plan]
    assert len(reports) == len(set(reports))


# --- counting --------------------------------------------------------------------------------


class Answering:
    """An engine that gives the same texts and reports for every request."""

    def __init__(self, *answers: tuple[str, dict[str, Any]]) -> None:
        self._answers = answers

    def chat(self, conversations: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        assert [c[0]["content"] for c in conversations] == [question for question, _ in FACTS]
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(text=text)], kv_transfer_params={"dllm": report}
            )
            for text, report in self._answers
        ]


def test_figures_of_a_case() -> None:
    llm = Answering(
        ("1 plus 1 is 2.", {"num_forwards": 3, "num_committed": 8}),
        ("1 plus 2 is 4.", {"num_forwards": 5, "num_committed": 24}),
    )
    row = measure(llm, FACTS, {}, IDENTITY)
    assert isinstance(row, Row)
    assert (row.questions, row.right, row.failed, row.accuracy) == (2, 1, 0, 0.5)
    assert row.forwards_per_answer == 4.0
    assert row.tokens_per_forward == 4.0


def test_failed_answers_are_wrong_and_are_told() -> None:
    llm = Answering(
        ("", {"error": "no\nprogress"}), ("1 plus 2 is 3.", {"num_forwards": 2, "num_committed": 8})
    )
    row = measure(llm, FACTS, {}, IDENTITY)
    assert isinstance(row, Row)
    assert (row.right, row.failed, row.forwards_per_answer) == (1, 1, 2.0)
    assert "1 of 2 answers failed: m, taught, threshold" in quality_speed.markdown([row], [])


def test_a_case_without_any_answer_is_refused() -> None:
    llm = Answering(("", {"error": "no\nprogress"}), ("", {"error": "no\nprogress"}))
    assert measure(llm, FACTS, {}, IDENTITY) == Refused(*IDENTITY, reason="no progress")


def test_limited_facts_are_spread_over_all_kinds(tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"q{i}", "answer": "a"}) for i in range(10)]
    (tmp_path / "facts.jsonl").write_text("\n".join(lines))
    assert [question for question, _ in read_facts(tmp_path, 3)] == ["q0", "q3", "q6"]
    assert len(read_facts(tmp_path, None)) == len(read_facts(tmp_path, 99)) == 10


# --- the whole command -----------------------------------------------------------------------


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not (LLADA / "config.json").is_file():
        pytest.fail(f"no model in {LLADA}: scripts/make_tiny_model.py makes it", pytrace=False)
    output = tmp_path / "results"
    status = quality_speed.main(
        [
            *("--models", str(LLADA), "--algorithms", "semi_ar", "threshold", "--caches", "none"),
            *("--limit", "4", "--block-length", "16", "--output-dir", str(output)),
        ]
    )
    captured = capsys.readouterr()
    assert status == 0, captured.err
    assert "100%" in captured.err  # the progress bar
    with (output / "quality_speed.csv").open() as file:
        table = list(csv.DictReader(file))
    assert captured.out.count("| llada-tiny |") == len(table)
    wanted = len(cases(["semi_ar", "threshold"], ["none"], 32, 16))
    assert len(table) == wanted * len(quality_speed.WORDINGS)
    taught = {
        (row["algorithm"], row["parameters"].split()[-1]): row
        for row in table
        if row["wording"] == "taught" and "random" not in row["parameters"]
    }
    slowest = taught["semi_ar", "steps=32"]
    assert float(slowest["accuracy"]) == 1.0
    assert float(slowest["tokens_per_forward"]) == 1.0
    assert float(slowest["forwards_per_answer"]) == 16.0  # answers end in the first block
    assert float(taught["semi_ar", "steps=8"]["tokens_per_forward"]) == 4.0
    assert float(taught["threshold", "defaults"]["tokens_per_forward"]) > 1.0
    content = json.loads((output / "quality_speed.json").read_text())
    assert [row["parameters"] for row in content["rows"]] == [row["parameters"] for row in table]
    assert content["settings"]["block_length"] == 16
    assert (output / "quality_speed.png").read_bytes().startswith(b"\x89PNG")
    assert "| semi" not in (output / "quality_speed.md").read_text()  # names are in backticks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--block-length", "5"], "error: --block-length: given 5"),
        (["--models", "/nowhere/at-all"], "error: --models: no checkpoint in /nowhere/at-all"),
    ],
)
def test_refusals(
    arguments: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert quality_speed.main([*arguments, "--output-dir", str(tmp_path / "results")]) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith(message)
    assert not (tmp_path / "results").exists()

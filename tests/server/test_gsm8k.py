# SPDX-License-Identifier: Apache-2.0
"""The GSM8K benchmark against a real server: sums, which the tiny model knows."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.server.process import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.process import ServerProcess


def test_sums(server: ServerProcess, tmp_path: Path) -> None:
    sums = [(2, 3), (4, 4), (9, 8), (0, 1)]
    lines = [
        json.dumps({"question": f"What is {a} plus {b}?", "answer": f"Add.\n#### {a + b}"})
        for a, b in sums
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "benchmarks" / "gsm8k.py"), "--host", server.url),
            *("--data", "sums.jsonl", "--output-dir", "out", "--concurrency", "2"),
            *("--gen-length", "32", "--block-length", "16", "--prompt", "{question}"),
            *("--algorithm", "threshold", "threshold=0.9"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["problems"], summary["right"]) == (4, 4)
    assert summary["tokens_per_forward"] > 1
    assert summary["tokens_per_s"] > 0
    with (tmp_path / "out" / "answers.csv").open(newline="") as file:
        texts = {row["text"] for row in csv.DictReader(file)}
    assert texts == {f"{a} plus {b} is {a + b}." for a, b in sums}

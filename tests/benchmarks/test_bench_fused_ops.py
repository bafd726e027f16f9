# SPDX-License-Identifier: Apache-2.0
"""benchmarks/kernels/bench_fused_ops.py: what it says without a GPU, and the record it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "kernels" / "bench_fused_ops.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without a GPU")
def test_says_what_it_needs() -> None:
    result = run()
    assert result.returncode == 2
    assert "needs a CUDA device" in result.stderr


@pytest.mark.gpu
def test_writes_a_record(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    result = run("--ops", "rms_norm", "store_keys_values", "--rows", "32", "--json", str(file))
    assert result.returncode == 0, result.stderr
    record = json.loads(file.read_text())
    assert {row[0] for row in record["rows"]} == {"rms_norm", "store_keys_values"}
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    assert all(row[2] > 0 for row in record["rows"])

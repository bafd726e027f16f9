# SPDX-License-Identifier: Apache-2.0
"""The timing module: what it counts; on a GPU, that graphs compute and inputs rotate."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_timing, run_record
from benchmarks.gpu_timing import write_record

ROOT = Path(__file__).resolve().parents[2]


def test_record_names_software_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "x.py"), "--name", "two words"])
    monkeypatch.setenv("MOSAIC_COMMIT", "0123456789ab")
    write_record(tmp_path / "new" / "x.json", {"rows": [1]})
    content = json.loads((tmp_path / "new" / "x.json").read_text())
    assert content["rows"] == [1]
    assert content["run"]["command"] == "python benchmarks/x.py --name 'two words'"
    assert content["run"]["commit"] == "0123456789ab"
    # What a build says of itself, such as +cpu, is not in every build's metadata.
    release = torch.__version__.partition("+")[0]
    assert content["run"]["packages"]["torch"].partition("+")[0] == release


def test_commit_is_none_where_there_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_record, "ROOT", tmp_path)
    monkeypatch.delenv("MOSAIC_COMMIT", raising=False)
    assert run_record.software_record()["commit"] is None


@pytest.mark.gpu
def test_graphs_compute_on_their_inputs() -> None:
    inputs = [torch.randn(64, 64, device="cuda") for _ in range(3)]
    outputs = [torch.zeros_like(x) for x in inputs]
    calls = [partial(torch.mul, x, 2.0, out=y) for x, y in zip(inputs, outputs, strict=True)]
    times = gpu_timing.compare({"a": calls, "b": calls[:1]}, repeats=3)
    assert {name: timing.num_measured for name, timing in times.items()} == {"a": 3, "b": 3}
    for x, y in zip(inputs, outputs, strict=True):
        torch.testing.assert_close(y, 2 * x)


@pytest.mark.gpu
def test_rotating_inputs_exceed_the_cache() -> None:
    inputs = gpu_timing.rotating(lambda: {"x": torch.randn(1024, 1024, device="cuda")}, most=10**6)
    assert sum(part["x"].nbytes for part in inputs) > 2 * gpu_timing.l2_bytes()
    assert len({part["x"].data_ptr() for part in inputs}) == len(inputs)

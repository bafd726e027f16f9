# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of single kernels, and their timers."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_timing, run_record
from benchmarks.gpu_timing import write_record
from benchmarks.kernels import bench_attention
from benchmarks.kernels.bench_attention import Case
from tests.programs import ROOT, output_of, run_python


def test_record_names_software_and_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "x.py"), "--name", "two words"])
    monkeypatch.setenv("MOSAIC_COMMIT", "0123456789ab")
    write_record(tmp_path / "new" / "x.json", {"rows": [1]})
    content = json.loads((tmp_path / "new" / "x.json").read_text())
    assert content["rows"] == [1]
    assert content["run"]["command"] == "python benchmarks/x.py --name 'two words'"
    assert content["run"]["commit"] == "0123456789ab"
    # The metadata of some builds lacks the local version, such as +cpu.
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


# ---- bench_attention.py ----


@pytest.mark.parametrize("keys", [5, 9])
def test_heads_and_layout_fit_together(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    monkeypatch.setattr(bench_attention, "random", lambda *shape: torch.randn(*shape))
    monkeypatch.setattr(bench_attention, "DEVICE", "cpu")
    case = Case("dream", num_sequences=2, num_queries=5, num_keys=keys)
    q, k, v = case.heads()
    assert q.shape == (10, 28, 128) and k.shape == v.shape == (2 * keys, 4, 128)
    layout = case.layout()
    assert layout.query_ends.tolist() == [0, 5, 10]
    assert layout.spans is not None and layout.spans[-1].kv_end == len(k)


def test_windows_read_every_page_of_a_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention, "random", lambda *shape: torch.randn(*shape))
    monkeypatch.setattr(bench_attention, "DEVICE", "cpu")
    case = Case("dream", num_sequences=2, num_queries=5, num_keys=128)
    assert case.is_window
    q, k, v = case.stored_heads()
    assert q.shape == (10, 28, 128) and len(k) == len(v) + 64 == 2 * 2 * 128
    rows = case.pages().rows_of(0, 256)
    stored = torch.cat([rows, rows + 64])  # keys, and values one page after them
    assert stored.sort().values.tolist() == list(range(512))
    assert not Case("dream", 1, 128, 128).is_window
    assert not Case("dream", 1, 5, 100).is_window


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_attention.main([])
    assert stop.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err


# ---- bench_fused_ops.py ----


SCRIPT = ROOT / "benchmarks" / "kernels" / "bench_fused_ops.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without a GPU")
def test_says_what_it_needs() -> None:
    result = run_python(SCRIPT)
    assert result.returncode == 2
    assert "needs a CUDA device" in result.stderr


@pytest.mark.gpu
def test_writes_a_record(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    operations = ("--ops", "rms_norm", "store_keys_values", "--rows", "32")
    output_of(sys.executable, SCRIPT, *operations, "--json", file)
    record = json.loads(file.read_text())
    assert {row[0] for row in record["rows"]} == {"rms_norm", "store_keys_values"}
    assert all(len(row) == len(record["columns"]) for row in record["rows"])
    assert all(row[2] > 0 for row in record["rows"])

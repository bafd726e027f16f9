# SPDX-License-Identifier: Apache-2.0
"""The step benchmark at tiny widths, and its evaluation of measurements."""

import json
from pathlib import Path

import pytest
import torch
from make_dummy_checkpoint import configuration

from benchmarks import harness, performance_tables, step_latency
from benchmarks.in_process import Step
from benchmarks.step_latency import Case, Reference, cases_of, row_of

pytestmark = pytest.mark.usefixtures("quick_starts")


def test_a_run_times_every_case_and_writes_what_the_document_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *("--families", "llada-moe", "--lengths", "8", "16", "--requests", "1", "2"),
        *("--num-layers", "2", "--shrink", "16", "--dtype", "float32", "--steps", "4"),
        *("--output-dir", str(tmp_path)),
    ]
    assert step_latency.main(arguments) == 0
    content = json.loads((tmp_path / "step_latency.json").read_text())
    cases = [(row["num_requests"], row["length"]) for row in content["rows"]]
    assert cases == [(1, 8), (1, 16), (2, 8), (2, 16)]
    for row in content["rows"]:
        assert 3 <= row["num_steps"] <= 4
        assert 0 < row["step_min_ms"] <= row["step_ms"]
        assert row["reference_ms"] > 0
        assert row["planned_ms"] > 0
        assert 8 <= row["touched_experts"] <= 64
    assert content["run"]["packages"]["vllm"] == "0.33.0"
    assert (tmp_path / "step_latency.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.count("llada-moe ") == 4
    lines = list(performance_tables.step_latency(content))
    assert sum(line.startswith("| 2 |") for line in lines) == 2


def test_fp8_attention_stands_beside_the_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *("--families", "llada", "--lengths", "64", "--requests", "1", "2", "--no-reference"),
        *("--num-layers", "1", "--shrink", "16", "--dtype", "float32", "--steps", "3"),
        *("--attention-dtype", "fp8", "--output-dir", str(tmp_path)),
    ]
    assert step_latency.main(arguments) == 0
    content = json.loads((tmp_path / "step_latency.json").read_text())
    cases = [(row["family"], row["num_requests"]) for row in content["rows"]]
    assert cases == [("llada fp8 attention", 1)]
    assert "fp8 attention" in capsys.readouterr().out


def test_without_the_reference_experts_are_still_counted() -> None:
    options = step_latency.parse_arguments(["--no-reference", "--lengths", "16", "64"])
    options.dtype = "float32"
    small = {"num_layers": 1, "shrink": 16}
    experts = configuration("llada-moe", **small)
    actual = step_latency.measure_references(experts, options)
    assert [reference.step_ms for reference in actual.values()] == [None, None]
    assert 8 <= actual[16].touched_experts <= actual[64].touched_experts <= 64
    dense = configuration("llada", **small)
    assert step_latency.measure_references(dense, options) == {}


def test_experts_are_those_of_all_steps() -> None:
    """The number is the mean over the canvases with which the steps begin, computed again here."""
    config = configuration("llada-moe", num_layers=2, shrink=16)
    model = step_latency.random_model(config, "cpu", torch.float32)
    row = step_latency.masked_row(model.shape, Case(16, 1))
    kept, canvases = row.clone(), [row.clone()]
    for _ in range(3):
        step_latency.denoise_step(model, row, 16, 2)
        canvases.append(row.clone())
    with step_latency.counted_experts(model) as counts, torch.inference_mode():
        for canvas in canvases:
            model(canvas)
    assert len(set(counts)) > 1
    assert step_latency.touched_experts(model, kept, 4) == pytest.approx(sum(counts) / 8)
    assert int((kept == model.shape.mask_id).sum()) == 8  # the row itself is unchanged


def test_several_requests_stay_below_the_largest_number_of_rows() -> None:
    assert cases_of([32, 4096, 16384], [1, 8], 4096) == [
        Case(32, 1),
        Case(4096, 1),
        Case(16384, 1),
        Case(32, 8),
    ]


def test_rows_take_medians_and_count_the_reference_once_a_request() -> None:
    steps = [Step(8, 0.0, 5.0, 4.0), Step(8, 0.010, 7.0, 6.0), Step(8, 0.030, 6.0, None)]
    row = row_of("llada", Case(64, 8), steps, 2.0, {64: Reference(3.0, None)})
    assert (row.step_ms, row.step_min_ms, row.device_ms) == (6.0, 5.0, 5.0)
    assert row.interval_ms == pytest.approx(15.0)
    assert (row.over_floor, row.speed_up) == (3.0, 4.0)
    missing = row_of("llada", Case(32, 1), steps, None, {32: Reference(None, None)})
    assert (missing.over_floor, missing.speed_up, missing.floor_ms) == (None, None, None)
    table = harness.Table(step_latency.COLUMNS, step_latency.ATTRIBUTES)
    assert table.line(missing).split()[-4:] == ["-"] * 4  # no lower bound and no reference

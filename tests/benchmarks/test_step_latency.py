# SPDX-License-Identifier: Apache-2.0
"""The step benchmark from end to end at tiny widths, and what it makes of its measurements."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from make_dummy_checkpoint import configuration

from benchmarks import harness, in_process, performance_tables, step_latency
from benchmarks.in_process import Step, StepLog, median_interval_ms
from benchmarks.step_latency import Case, Reference, cases_of, num_steps, row_of

if TYPE_CHECKING:
    from pathlib import Path

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
    assert content["run"]["packages"]["vllm"] == "0.32.0"
    assert (tmp_path / "step_latency.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.count("llada-moe ") == 4
    lines = list(performance_tables.step_latency(content))
    assert sum(line.startswith("| 2 |") for line in lines) == 2


def test_without_the_reference_experts_are_still_counted() -> None:
    options = step_latency.parse_arguments(["--no-reference", "--lengths", "16", "64"])
    options.dtype = "float32"
    small = {"num_layers": 1, "shrink": 16}
    experts = configuration("llada-moe", **small)
    found = step_latency.measure_references(experts, options)
    assert [reference.step_ms for reference in found.values()] == [None, None]
    assert 8 <= found[16].touched_experts <= found[64].touched_experts <= 64
    dense = configuration("llada", **small)
    assert step_latency.measure_references(dense, options) == {}


def test_experts_are_those_of_all_steps() -> None:
    """The mean over the canvases that the steps begin with, each run anew."""
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
    assert int((kept == model.shape.mask_id).sum()) == 8  # the row itself is left alone


def test_several_requests_stay_below_the_largest_number_of_rows() -> None:
    assert cases_of([32, 4096, 16384], [1, 8], 4096) == [
        Case(32, 1),
        Case(4096, 1),
        Case(16384, 1),
        Case(32, 8),
    ]


def test_a_request_is_half_prompt_at_most_one_block() -> None:
    assert [Case(length, 1).canvas for length in (8, 32, 64, 4096)] == [4, 16, 32, 32]


def test_number_of_steps_follows_the_time() -> None:
    assert num_steps(expected_ms=1.0, most=16, seconds=3.0) == 16
    assert num_steps(expected_ms=500.0, most=16, seconds=3.0) == 6
    assert num_steps(expected_ms=9000.0, most=16, seconds=3.0) == 3


def test_rows_take_medians_and_count_the_reference_once_a_request() -> None:
    steps = [Step(8, 0.0, 5.0, 4.0), Step(8, 0.010, 7.0, 6.0), Step(8, 0.030, 6.0, None)]
    row = row_of("llada", Case(64, 8), steps, 2.0, {64: Reference(3.0, None)})
    assert (row.step_ms, row.step_min_ms, row.device_ms) == (6.0, 5.0, 5.0)
    assert row.interval_ms == pytest.approx(15.0)
    assert (row.over_floor, row.speed_up) == (3.0, 4.0)
    missing = row_of("llada", Case(32, 1), steps, None, {32: Reference(None, None)})
    assert (missing.over_floor, missing.speed_up, missing.floor_ms) == (None, None, None)
    table = harness.Table(step_latency.COLUMNS, step_latency.ATTRIBUTES)
    assert table.line(missing).split()[-4:] == ["-"] * 4  # no floor, no reference


def test_steps_are_measured_after_a_warm_up_of_other_sizes() -> None:
    asked: list[int] = []

    def run(steps: int) -> list[Step]:
        asked.append(steps)
        return [Step(1, 0.0, 400.0, None)] * steps

    options = SimpleNamespace(steps=16, seconds=2.0)
    assert len(step_latency.measure_steps(run, options)) == 5
    assert asked == [3, 5]


def test_kernels_are_told_longest_first() -> None:
    busy, longest = step_latency.kernel_lines({"gemm": (2.0, 7.0), "copy": (0.5, 1.0)}, most=1)
    assert "device busy 2.500 ms" in busy
    assert "7.0 x  gemm" in longest


def test_intervals_are_between_starts() -> None:
    steps = [Step(1, started, 1.0, None) for started in (0.0, 1.0, 3.0, 4.0)]
    assert median_interval_ms(steps) == pytest.approx(1000.0)


def test_log_hands_results_on_and_lets_the_runner_go() -> None:
    class Runner:
        device = SimpleNamespace(type="cpu")

        def launch(self, req_ids: list[str]) -> Any:
            batch = SimpleNamespace(num_rows=40, num_sampled=8)
            memory = SimpleNamespace(plan=SimpleNamespace(predicted_seconds=0.002))
            told = {"started": len(req_ids), "req_ids": req_ids}
            return SimpleNamespace(**told, batch=batch, memory=memory)

        def collect(self, step: Any) -> dict[str, Any]:
            return dict.fromkeys(step.req_ids, "result")

    runner = Runner()
    before = runner.launch(["a", "b", "c"])
    with StepLog().attached(runner) as log:
        runner.collect(before)  # launched by nobody who looked at the clock
        step = runner.launch(["a", "b"])
        assert runner.collect(step) == {"a": "result", "b": "result"}
    runner.collect(runner.launch(["c"]))
    (found,) = log.steps()
    sizes = found.num_requests, found.num_rows, found.num_sampled
    assert (*sizes, found.planned_ms) == (2, 40, 8, 2.0)


@pytest.mark.parametrize(
    "arguments", [["--lengths", "1"], ["--requests", "0"], ["--steps", "2"], ["--families", "x"]]
)
def test_arguments_out_of_range_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        step_latency.parse_arguments(arguments)
    assert caught.value.code == 2


def test_random_prompts_hold_ordinary_tokens_and_depend_on_the_seed() -> None:
    prompt = in_process.random_prompt(100, 1000, seed=1)
    assert prompt == in_process.random_prompt(100, 1000, seed=1)
    assert prompt != in_process.random_prompt(100, 1000, seed=2)
    assert all(0 <= token < 500 for token in prompt)

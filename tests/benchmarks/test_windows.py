# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of block-causal families at tiny widths, and what their steps must at least take."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from make_dummy_checkpoint import configuration

from benchmarks import (
    commit_fusion,
    performance_tables,
    prefix_cache,
    step_latency,
    windows,
)
from benchmarks.shapes import Shape, window_stages

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("quick_starts")

RATES = (4.3e12, 700e12, 550e12)  # of one H200: copy, products, attention
SMALL = ("--num-layers", "2", "--shrink", "16", "--dtype", "float32")


def floor(family: str, block_length: int, num_requests: int, touched: float | None = None) -> float:
    shape = Shape.of(configuration(family))
    stages = window_stages(shape, block_length, 1024, num_requests, touched_experts=touched)
    return sum(stage.least_ms(*RATES) for stage in stages)


@pytest.mark.parametrize(
    ("family", "block_length", "num_requests", "touched", "expected"),
    [
        ("llada2", 32, 1, 163.0, 4.9),
        ("llada2", 32, 64, None, 11.5),
        ("llada2", 32, 128, None, 15.8),
        ("sdar", 4, 128, None, 15.8),
        ("sdar", 32, 128, None, 93.0),
    ],
)
def test_floors_of_the_released_shapes(
    family: str, block_length: int, num_requests: int, touched: float | None, expected: float
) -> None:
    """Milliseconds that were worked out by hand."""
    assert floor(family, block_length, num_requests, touched) == pytest.approx(expected, rel=0.03)


def test_a_stage_waits_for_what_takes_longer() -> None:
    shape = Shape.of(configuration("sdar"))
    one, many = (window_stages(shape, 4, 1024, count, head_rows=2) for count in (1, 1000))
    assert [stage.name for stage in one] == [
        *("attention's products", "attention", "feed-forward", "head")
    ]
    for few, all_ in zip(one, many, strict=True):
        grows = few.name == "attention"  # each request reads keys of its own
        assert all_.num_bytes == few.num_bytes * (1000 if grows else 1)
        assert all_.flops == few.flops * 1000
    kept = 1028 * 2 * 2 * shape.kv_width
    assert one[1].num_bytes == kept
    assert one[3].flops == 2 * 2 * shape.width * shape.vocab_size
    bound_by_bytes, bound_by_flops = one[2].least_ms(*RATES), many[2].least_ms(*RATES)
    assert bound_by_bytes == pytest.approx(1000 * 36 * one[2].num_bytes / RATES[0])
    assert bound_by_flops == pytest.approx(1000 * 36 * many[2].flops / RATES[1])


def test_experts_that_no_row_passes_are_not_read() -> None:
    shape = Shape.of(configuration("llada2"))
    some, all_ = (window_stages(shape, 32, 0, 1, touched_experts=n) for n in (10, None))
    read = {stage.name: stage for stage in some}
    assert read["experts"].num_bytes == 10 * 2 * 3 * 2048 * 512
    assert read["experts"].count == 19 and read["feed-forward"].count == 1
    assert read["router, shared expert"].num_bytes == 2 * 2048 * (256 + 3 * 512)
    whole = {stage.name: stage for stage in all_}
    assert whole["experts"].num_bytes == 25.6 * read["experts"].num_bytes
    assert whole["experts"].flops == read["experts"].flops == 2 * 32 * 8 * 3 * 2048 * 512


@pytest.mark.slow
def test_windows_are_timed_behind_a_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *("--families", "llada2", "--requests", "2", "--block-lengths", "8"),
        *("--context", "64", "--steps", "4", *SMALL, "--output-dir", str(tmp_path)),
    ]
    assert step_latency.main(arguments) == 0
    content = json.loads((tmp_path / "step_latency.json").read_text())
    (row,) = content["rows"]
    assert (row["family"], row["num_requests"]) == ("llada2", 2)
    assert (row["context"], row["length"]) == (64, 8)
    assert 3 <= row["num_steps"] <= 4
    assert 0 < row["step_min_ms"] <= row["step_ms"]
    printed = capsys.readouterr().out
    assert printed.count(" 64+8 ") == 1
    assert printed.count(" of 256 experts a layer") == 1
    assert any("64 + 8" in line for line in performance_tables.step_latency(content))


@pytest.mark.slow
def test_fusion_takes_fewer_forwards(tmp_path: Path) -> None:
    arguments = [
        *("--requests", "1", "2", "--context", "16", "--gen-length", "16", "--rounds", "1"),
        *(*SMALL, "--output-dir", str(tmp_path)),
    ]
    assert commit_fusion.main(arguments) == 0
    assert commit_fusion.VARIABLE not in os.environ
    rows = json.loads((tmp_path / "commit_fusion.json").read_text())["rows"]
    # Four blocks of two forwards; without fusion one more for the prompt and each finished block.
    assert [(r["is_fused"], r["num_requests"], r["num_forwards"]) for r in rows] == [
        *((True, 1, 8), (True, 2, 8), (False, 1, 12), (False, 2, 12)),
    ]
    assert all(row["num_tokens"] == 16 * row["num_requests"] for row in rows)


@pytest.mark.slow
def test_a_shared_prefix_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = prefix_cache.to_first_block_ms

    def recorded(llm: Any, runner: Any, prompt: Any, parameters: Any) -> float:
        with windows.in_process.StepLog().attached(runner) as log:
            windows.in_process.run_requests(llm, [prompt], parameters)
        seen.append(sum(step.num_rows for step in log.steps()))
        return plain(llm, runner, [*prompt[:-1], 1], parameters)

    monkeypatch.setattr(prefix_cache, "to_first_block_ms", recorded)
    arguments = ["--prefix", "256", "--rounds", "1", *SMALL, "--output-dir", str(tmp_path)]
    assert prefix_cache.main(arguments) == 0
    content = json.loads((tmp_path / "prefix_cache.json").read_text())
    assert {len(times) for times in content["times_ms"].values()} == {1}
    first, shared, short = seen[:3]
    assert first > 256 > shared >= short


class Routers:
    """Stands in for a runner: two layers, whose routers see what `rows` says."""

    def __init__(self, *gates: torch.Tensor) -> None:
        self.graphs = SimpleNamespace(run=None)
        self.gates = gates
        norm = torch.nn.Parameter(torch.ones(4))
        self.model = SimpleNamespace(named_parameters=lambda: [("layers.0.q_norm.weight", norm)])
        self.norm = norm

    def run(self, rows: torch.Tensor) -> None:
        from vllm.diffusion import ops

        for gate in self.gates:
            ops.route_rows(rows, gate, 2)


def test_routers_forget_what_all_rows_share_and_experts_are_counted() -> None:
    torch.manual_seed(0)
    runner = Routers(torch.randn(8, 16), torch.randn(8, 16))
    rows = 100 * torch.randn(16) + torch.randn(32, 16)
    other = torch.randn(5, 16)
    alike = windows.touched_experts(runner, 32, lambda: runner.run(rows))
    windows.spread_experts(runner, 32, lambda: (runner.run(other), runner.run(rows)))
    assert runner.norm.tolist() == [windows.QK_GAIN] * 4
    for gate in runner.gates:
        assert (gate @ rows.mean(dim=0)).abs().max() < 1e-3
    assert alike < windows.touched_experts(runner, 32, lambda: runner.run(rows)) == 8
    assert windows.touched_experts(runner, 5, lambda: runner.run(other)) < 8.1

# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of block-causal families at tiny widths, and lower bounds of their step times."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from make_dummy_checkpoint import configuration

from benchmarks import (
    commit_fusion,
    performance_tables,
    prefix_cache,
    self_speculation,
    speculation,
    step_latency,
    windows,
)
from benchmarks.shapes import Shape, window_stages
from vllm.diffusion.decoding import Candidates
from vllm.diffusion.request import decision
from vllm.diffusion.request.families import NEMOTRON
from vllm.diffusion.request.served_model import ServedModel, SpecialIds

pytestmark = pytest.mark.usefixtures("quick_starts")

RATES = (4.3e12, 700e12, 550e12)  # one H200: bytes/s of copies, FLOP/s of products and attention
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
    """Lower bounds in milliseconds equal calculations by hand."""
    assert floor(family, block_length, num_requests, touched) == pytest.approx(expected, rel=0.03)


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


def test_fusion_takes_fewer_forwards(tmp_path: Path) -> None:
    arguments = [
        *("--requests", "1", "2", "--context", "16", "--gen-length", "16", "--rounds", "1"),
        *(*SMALL, "--output-dir", str(tmp_path)),
    ]
    assert commit_fusion.main(arguments) == 0
    assert commit_fusion.VARIABLE not in os.environ
    rows = json.loads((tmp_path / "commit_fusion.json").read_text())["rows"]
    # Four blocks take two forward passes each. Without fusion, the prompt and each finished block
    # take one more.
    assert [(r["is_fused"], r["num_requests"], r["num_forwards"]) for r in rows] == [
        *((True, 1, 8), (True, 2, 8), (False, 1, 12), (False, 2, 12)),
    ]
    assert all(row["num_tokens"] == 16 * row["num_requests"] for row in rows)


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


def test_so_many_drafts_are_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed is settled first, and then four tokens in two forward passes each time."""
    monkeypatch.setattr(self_speculation.Confirming, "accepted", 3)
    ids = SpecialIds(mask=15, eos=14, eot=None, stop=frozenset())
    parameters = {"algorithm": "self_speculation", "gen_length": 13, "block_length": 8}
    params = decision.decide(parameters, ServedModel(NEMOTRON, ids, 64, 16), [1])
    rule, tokens = self_speculation.Confirming(params, 1), np.array([1, *[15] * 20])
    counts = []
    while (work := rule.prepare(tokens)) is not None:
        drafts = np.arange(work.eligible.size) % 5 + 7 * work.is_causal  # all drafts are wrong
        commit = rule.decide(Candidates(work.eligible, drafts, np.ones(drafts.size)))
        tokens[commit.positions] = commit.tokens
        counts.append(rule.num_settled(tokens) - 1)
    assert counts == [1, 1, 5, 5, 9, 9, 13]


class Routers:
    """A fake runner with two routers, which read the rows that are passed to `run`."""

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


def test_right_guesses_save_forwards(tmp_path: Path) -> None:
    arguments = [
        *("--context", "132", "--gen-length", "16", "--block-length", "8", "--rounds", "1"),
        *("--states", "4", "--clients", "1", "--chances", "1"),
        *("--family", "llada", *SMALL, "--shrink", "32", "--output-dir", str(tmp_path)),
    ]
    assert speculation.main(arguments) == 0
    rows = json.loads((tmp_path / "speculation.json").read_text())["rows"]
    plain, oracle, *weighed = rows
    assert (plain["steps_per_forward"], plain["held"], plain["gain"]) == (1, None, 1)
    # A block takes a whole forward pass, and its other seven steps take two.
    assert (oracle["steps_per_forward"], oracle["held"]) == (pytest.approx(16 / 6), 1)
    assert all(row["steps_per_s"] > 0 for row in rows)
    assert [(row["clients"], row["chance"]) for row in weighed] == [(1, None), (1, 1)]
    content = json.loads((tmp_path / "speculation.json").read_text())
    assert any("| 1 | 4 | 1.00 |" in line for line in performance_tables.speculation(content))
    assert (tmp_path / "speculation.png").stat().st_size > 1000

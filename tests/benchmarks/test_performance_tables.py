# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md holds what was measured, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import performance_tables  # noqa: E402
from benchmarks.performance_tables import TableError, cell, filled  # noqa: E402

RUN = {
    "date": "2026-01-02 03:04 UTC",
    "command": "python benchmarks/x.py",
    "commit": "0123456789ab",
    "packages": {"torch": "2.11.0", "triton": None},
    "machine": "x86_64",
    "num_cpus": 4,
    "gpu": "A Card",
    "gpu_memory_gib": 80.0,
    "driver": "580.1",
}
STEP: dict[str, Any] = {
    "family": "llada-moe",
    "length": 4096,
    "num_requests": 1,
    "num_steps": 3,
    "step_ms": 20.0,
    "step_min_ms": 19.0,
    "device_ms": 19.5,
    "interval_ms": 20.5,
    "floor_ms": 16.0,
    "reference_ms": None,
    "touched_experts": 63.5,
}
DOCUMENT = "".join(
    f"# {name}\n<!-- measured: {name} -->\nold\n<!-- /measured -->\nkept\n"
    for name in performance_tables.TABLES
)


def write(folder: Path, name: str, **content: Any) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"run": RUN, **content}))


def test_document_holds_exactly_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert performance_tables.main(["--check"]) == 0, capsys.readouterr().err


def test_document_has_every_section() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    names = [match["name"] for match in performance_tables.SECTION.finditer(text)]
    assert sorted(names) == sorted(performance_tables.TABLES)


def test_steps_become_a_table_with_their_ratios(tmp_path: Path) -> None:
    write(
        tmp_path,
        "steps.json",
        kind="step_latency",
        settings={"dtype": "bfloat16", "num_layers": None, "shrink": 1, "enforce_eager": True},
        ceilings={
            "copy_tb_per_s": 4.25,
            "matmul_tflop_per_s": 790.4,
            "attention_tflop_per_s": {"4096 x 16 heads": 600.0},
        },
        rows=[STEP],
    )
    text = filled(DOCUMENT, tmp_path)
    assert "### Step of LLaDA-MoE-7B-A1B (without CUDA graphs)" in text
    assert "copy 4.25 TB/s, matrix product 790 TFLOP/s" in text
    assert "| 1 | 4,096 | 20.0 | 19.0 | 20.5 | 16.0 | 1.25 | - | - | 63.5 |" in text
    assert "A Card (80.0 GiB, driver 580.1) with torch 2.11.0, commit 0123456789ab" in text
    assert "old" not in text.split("# throughput")[0]
    assert text.count("kept") == len(performance_tables.TABLES)


def test_throughput_is_set_against_the_plain_loop(tmp_path: Path) -> None:
    names = ("prompt_length", "gen_length", "block_length", "steps")
    rows = [
        {
            "system": system,
            "cache": "none",
            "num_clients": 1,
            "tokens_per_s": tokens_per_s,
            "ms_per_forward": 7.0,
        }
        for system, tokens_per_s in (("plain loop", 50.0), ("server", 200.0))
    ]
    settings = {"model": "llada", **dict.fromkeys(names, 32)}
    write(tmp_path, "t.json", kind="throughput", settings=settings, rows=rows)
    assert "| server | none | 1 | 200 | 7.00 | 4.00 |" in filled(DOCUMENT, tmp_path)


def test_lengths_that_ran_and_the_first_that_failed(tmp_path: Path) -> None:
    point = {
        "length": 204800,
        "status": "ok",
        "first_ms": 45000.0,
        "median_ms": 44000.0,
        "last_ms": 44500.0,
        "gpu_peak_bytes": 24 * 2**30,
        "host_peak_bytes": 3 * 2**29,
        "activation_peak_bytes": 204800 * 24 * 1024,
        "activation_average_bytes": 204800 * 20 * 1024,
        "plan": "plan for T = 204800: logits 1061; predicted peak 4.50 GiB, time 4.5e+01 s",
    }
    failed = {"length": 262144, "status": "out of memory"}
    settings = {
        "model_path": "/models/llada-8b-dummy",
        "alpha": 0.5,
        "steps": 4,
        "activation_pool_size_bytes": 9 * 2**30,
        "gpu_memory_utilization": 0.3,
        "environment": {"VLLM_USE_HOST_RESIDUAL": "0"},
    }
    points = [point, failed]
    write(tmp_path, "c.json", kind="context_length", settings=settings, points=points)
    text = filled(DOCUMENT, tmp_path)
    limits = "24.0 GiB of the GPU, 9.00 GiB of activations, no rows in host memory"
    assert f"### llada-8b-dummy: 50% prompt, 4 steps ({limits})" in text
    row = "204,800 | 45,000 | 44,000 | 44,500 | 45,000 | 24.0 | 1.50 | 4.69 | 4.50 | 24.0 | 1.20"
    assert f"| {row} |" in text
    assert "262,144 tokens: out of memory." in text


def test_kernels_and_attention_have_sections_of_their_own(tmp_path: Path) -> None:
    names = ("kernels/op.json", "kernels/attention_choice.json", "kernels/memory_of_requests.json")
    for name in names:
        title = f"about {name}"
        write(tmp_path, name, title=title, columns=["rows", "us"], rows=[[32, 1.234], [64, 250.0]])
    text = filled(DOCUMENT, tmp_path)
    before, kernels = text.split("# kernels")
    memory, attention = before.split("# attention")
    assert "about kernels/memory_of_requests.json" in memory
    assert "about kernels/attention_choice.json" in attention
    assert "about kernels/op.json" in kernels
    assert "| 32 | 1.23 |\n| 64 | 250 |" in kernels


def test_without_measurements_sections_are_empty(tmp_path: Path) -> None:
    text = filled(DOCUMENT, tmp_path)
    assert "old" not in text
    assert "|" not in text


def test_filling_twice_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, "kernels/op.json", title="op", columns=["rows"], rows=[[1]])
    once = filled(DOCUMENT, tmp_path)
    assert filled(once, tmp_path) == once


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"kind": "unheard_of"}, "it is no measurement"),
        ({"title": "op", "columns": ["a", "b"], "rows": [[1]]}, "wanted 2 cells, got 1"),
        ({"kind": "step_latency"}, "settings"),
    ],
)
def test_bad_files_are_named(content: dict[str, Any], named: str, tmp_path: Path) -> None:
    write(tmp_path, "bad.json", **content)
    with pytest.raises(TableError, match=r"bad\.json") as caught:
        filled(DOCUMENT, tmp_path)
    assert named in str(caught.value)


def test_a_measurement_without_a_section_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "op.json", title="op", columns=["rows"], rows=[[1]])
    with pytest.raises(TableError, match="measured: kernels"):
        filled("# no sections\n", tmp_path)


def test_check_sees_a_difference_and_writing_mends_it(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text(DOCUMENT)
    arguments = ["--document", str(document), "--measurements", str(tmp_path / "none")]
    assert performance_tables.main([*arguments, "--check"]) == 1
    assert document.read_text() == DOCUMENT
    assert performance_tables.main(arguments) == 0
    assert performance_tables.main([*arguments, "--check"]) == 0


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (3, "3"),
        (0.01234, "0.012"),
        (0.986, "0.99"),
        (12.34, "12.3"),
        (1234.5, "1,234"),
        ("bf16", "bf16"),
    ],
)
def test_cells(value: object, shown: str) -> None:
    assert cell(value) == shown

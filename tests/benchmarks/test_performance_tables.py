# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks become the tables of the documents."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import performance_tables
from benchmarks.performance_tables import TableError, section

RUN: dict[str, Any] = {"date": "2026-01-02 03:04 UTC", "command": "python benchmarks/x.py"}
RUN |= {"commit": "0123456789ab", "packages": {"torch": "2.11.0", "triton": None}}
RUN |= {"machine": "x86_64", "num_cpus": 4}
RUN |= {"gpu": "A Card", "gpu_memory_gib": 80.0, "driver": "580.1"}
STEP: dict[str, Any] = {"family": "llada-moe", "length": 4096, "num_requests": 1, "num_steps": 3}
STEP |= {"step_ms": 20.0, "step_min_ms": 19.0, "device_ms": 19.5, "interval_ms": 20.5}
STEP |= {"floor_ms": 16.0, "reference_ms": None, "touched_experts": 63.5}


def table_of(folder: Path, **content: Any) -> str:
    path = folder / "measured.json"
    path.write_text(json.dumps({"run": RUN, **content}))
    return "\n".join(section(path))


def test_steps_become_a_table_with_their_ratios(tmp_path: Path) -> None:
    text = table_of(
        tmp_path,
        kind="step_latency",
        settings={"dtype": "bfloat16", "num_layers": None, "shrink": 1, "enforce_eager": True},
        ceilings={
            "copy_tb_per_s": 4.25,
            "matmul_tflop_per_s": 790.4,
            "attention_tflop_per_s": {"4096 x 16 heads": 600.0},
        },
        rows=[STEP],
    )
    assert "### Step of LLaDA-MoE-7B-A1B (without CUDA graphs)" in text
    assert "copy 4.25 TB/s, matrix product 790 TFLOP/s" in text
    assert "| 1 | 4,096 | 20.0 | 19.0 | 20.5 | 16.0 | 1.25 | - | - | 63.5 |" in text
    assert "A Card (80.0 GiB, driver 580.1) with torch 2.11.0, commit 0123456789ab" in text


def test_lengths_that_ran_and_the_first_that_failed(tmp_path: Path) -> None:
    point: dict[str, Any] = {"length": 204800, "status": "ok"}
    point |= {"first_ms": 45000.0, "median_ms": 44000.0, "last_ms": 44500.0}
    point |= {"gpu_peak_bytes": 24 * 2**30, "host_peak_bytes": 3 * 2**29}
    point |= {
        f"activation_{k}_bytes": 204800 * n * 1024 for k, n in (("peak", 24), ("average", 20))
    }
    point["plan"] = "plan for T = 204800: logits 1061; predicted peak 4.50 GiB, time 4.5e+01 s"
    failed = {"length": 262144, "status": "out of memory"}
    settings = {"model_path": "/models/llada-8b-dummy", "alpha": 0.5, "steps": 4}
    settings |= {"activation_pool_size_bytes": 9 * 2**30, "gpu_memory_utilization": 0.3}
    settings["environment"] = {"VLLM_USE_HOST_RESIDUAL": "0"}
    points = [point, failed]
    text = table_of(tmp_path, kind="context_length", settings=settings, points=points)
    limits = "24.0 GiB of the GPU, 9.00 GiB of activations, no rows in host memory"
    assert f"### llada-8b-dummy: 50% prompt, 4 steps ({limits})" in text
    row = "204,800 | 45,000 | 44,000 | 44,500 | 45,000 | 24.0 | 1.50 | 4.69 | 4.50 | 24.0 | 1.20"
    assert f"| {row} |" in text
    assert "262,144 tokens: out of memory." in text


def test_files_are_printed_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table_of(tmp_path, title="op", columns=["rows"], rows=[[1]])
    file = str(tmp_path / "measured.json")
    assert performance_tables.main([file, file]) == 0
    assert capsys.readouterr().out.count("### op\n") == 2
    assert performance_tables.main([file, str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"kind": "unheard_of"}, "not a measurement"),
        ({"title": "op", "columns": ["a", "b"], "rows": [[1]]}, "wanted 2 cells, got 1"),
        ({"kind": "step_latency"}, "settings"),
    ],
)
def test_bad_files_are_named(content: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"measured\.json") as caught:
        table_of(tmp_path, **content)
    assert named in str(caught.value)

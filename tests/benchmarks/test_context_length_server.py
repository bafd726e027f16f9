# SPDX-License-Identifier: Apache-2.0
"""The context-length benchmark from end to end: real servers of the tiny model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.process import MODEL, ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path


def run_benchmark(folder: Path, **options: Any) -> str:
    """What the entry point printed; it must succeed."""
    entry = ROOT / "benchmarks" / "llada" / "run_benchmark.py"
    asked = {"model-path": MODEL, "output-dir": "out", "shutdown-timeout": 60, **options}
    done = subprocess.run(
        [sys.executable, str(entry), *(f"--{name}={value}" for name, value in asked.items())],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_length_runs_and_one_beyond_the_servers_is_refused(tmp_path: Path) -> None:
    """Two servers; the search between two lengths is tested with a server that stands in."""
    options = {"start": 288, "step": 224, "max": 512, "precision": 224, "steps": 2}
    options["max-model-len"] = 300
    printed = run_benchmark(tmp_path, **options)
    assert "longest length that runs: 288" in printed
    content = json.loads((tmp_path / "out" / "context_length.json").read_text())
    points = {point["length"]: point for point in content["points"]}
    assert {length: point["status"] for length, point in points.items()} == {
        288: "ok",
        512: "refused",
    }
    assert "exceed max_model_len 300" in points[512]["reason"]
    point = points[288]
    assert (point["num_steps"], point["diffusion"]["num_forwards"]) == (2, 2)
    assert min(point["first_ms"], point["median_ms"], point["last_ms"]) > 0
    assert point["host_peak_bytes"] > 2**28, "the engine's process is counted"
    log = (tmp_path / "out" / "logs" / "server_288.log").read_text()
    assert "rows = 288" in log
    assert (tmp_path / "out" / "context_length.png").read_bytes().startswith(b"\x89PNG")
    again = run_benchmark(tmp_path, **options)
    assert again.count("(measured before)") == 2

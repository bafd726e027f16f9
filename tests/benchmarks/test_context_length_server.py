# SPDX-License-Identifier: Apache-2.0
"""The context-length benchmark runs with a real server of the tiny model on the CPU."""

import json
import sys
from pathlib import Path

from tests.programs import ROOT, output_of
from tests.server.process import MODEL, environment


def test_a_length_runs(tmp_path: Path) -> None:
    """One server runs. Tests with a fake server cover searches, failures and resumed runs."""
    entry = ROOT / "benchmarks" / "llada" / "run_benchmark.py"
    options = {"model-path": MODEL, "output-dir": "out", "shutdown-timeout": 60, "steps": 2}
    options |= {"start": 288, "step": 224, "max": 288, "precision": 224, "max-model-len": 300}
    given = [f"--{name}={value}" for name, value in options.items()]
    output = output_of(sys.executable, entry, *given, timeout=600, cwd=tmp_path, env=environment())
    assert "longest length that runs: 288" in output
    (point,) = json.loads((tmp_path / "out" / "context_length.json").read_text())["points"]
    assert (point["length"], point["status"]) == (288, "ok")
    assert (point["num_steps"], point["diffusion"]["num_forwards"]) == (2, 2)
    assert min(point["first_ms"], point["median_ms"], point["last_ms"]) > 0
    assert point["host_peak_bytes"] > 2**28, "the engine's process is counted"
    log = (tmp_path / "out" / "logs" / "server_288.log").read_text()
    assert "rows = 288" in log
    assert (tmp_path / "out" / "context_length.png").read_bytes().startswith(b"\x89PNG")

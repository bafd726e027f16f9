# SPDX-License-Identifier: Apache-2.0
"""The benchmark of canvases that begin as noise, at tiny widths."""

import json
from pathlib import Path

import pytest

from benchmarks import canvas_steps

pytestmark = pytest.mark.usefixtures("quick_starts")


def test_steps_of_canvases_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ACTIVATION_POOL_SIZE_BYTES", str(512 << 20))  # its vocabulary is whole
    scale = ("--num-layers", "2", "--shrink", "16", "--dtype", "float32")
    sizes = ("--clients", "1", "--context", "40", "--canvases", "1", "--steps", "3")
    output = ("--output-dir", str(tmp_path))
    assert canvas_steps.main([*scale, *sizes, *output]) == 0
    rows = json.loads((tmp_path / "canvas_steps.json").read_text())["rows"]
    assert [(row["clients"], row["rows"]) for row in rows] == [(1, 256)]
    for row in rows:
        assert row["num_steps"] == 2  # the first step reads the prompt, too
        assert row["interval_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(1000 * row["rows"] / (3 * row["interval_ms"]))

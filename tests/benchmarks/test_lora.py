# SPDX-License-Identifier: Apache-2.0
"""The benchmark of LoRA adapters at tiny widths."""

import json
from pathlib import Path

import pytest

from benchmarks import lora

pytestmark = pytest.mark.usefixtures("quick_starts")

TINY = ("--num-layers", "2", "--shrink", "16", "--dtype", "float32")


def test_every_case_is_measured_with_and_without_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("--rows", "16", "32", "--ranks", "8", "4", "--rounds", "1", "--steps", "2")
    assert lora.main([*TINY, *sizes, "--output-dir", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "lora.json").read_text())
    cases = [(row["modules"], row["rank"], row["rows"]) for row in content["rows"]]
    kinds = [(modules, rank) for modules in ("all", "attention") for rank in (8, 4)]
    assert cases == [(*kind, rows) for kind in kinds for rows in (16, 32)]
    for row in content["rows"]:
        assert min(row[f"{name}_ms"] for name in ("without", "none", "adapter")) > 0
    assert capsys.readouterr().out.count("attention ") == 4


def test_several_adapters_share_steps(tmp_path: Path) -> None:
    sizes = ("--mixed", "--modules", "all", "--ranks", "16", "--rounds", "1", "--steps", "2")
    assert lora.main([*TINY, *sizes, "--output-dir", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "lora.json").read_text())["rows"]
    assert (row["num_requests"], row["rows"], row["limit"]) == (9, 288, 1.18)

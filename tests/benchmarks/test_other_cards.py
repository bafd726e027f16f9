# SPDX-License-Identifier: Apache-2.0
"""Estimated steps on other GPUs follow from a GPU that was measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import other_cards


def run_of(gpu: str, *families: str, factor: float = 1.0) -> dict[str, Any]:
    rows = [
        {"family": family, "length": length, "num_requests": 1, "device_ms": factor * ms}
        for family in families
        for length, ms in ((32, 6.0), (256, 12.0))
    ]
    return {"run": {"gpu": gpu}, "rows": rows}


def test_a_card_follows_its_bandwidth_and_its_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step_latency.json"
    path.write_text(json.dumps(run_of("NVIDIA H100", "llada", "llada int4")))
    assert other_cards.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "bf16: 0.75 of the bandwidth" in text
    assert [line.split(":")[0] for line in text.splitlines() if "not measured" in line] == ["fp8"]
    named = {(row.split("|")[1].strip(), row.split("|")[2].strip()) for row in table_of(text)}
    assert ("RTX 3060 12 GB", "int4") in named and ("RTX 3060 12 GB", "bf16") not in named
    assert ("RTX 4090", "fp8") in named and ("A100 80 GB", "fp8") not in named


def table_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")][2:]


def test_steps_scale_with_what_was_measured() -> None:
    (kind,) = other_cards.kinds_of(run_of("NVIDIA H100", "llada"))
    (slower,) = other_cards.kinds_of(run_of("NVIDIA H100", "llada", factor=2.0))
    same = other_cards.MEASURED["H100"]
    for rows, ms in ((32, 6.0), (256, 12.0)):
        assert kind.seconds(same, rows) == pytest.approx(ms / 1000)
        assert slower.seconds(same, rows) == pytest.approx(2 * ms / 1000)
    speeds = [
        other_cards.tokens_a_second(kind, same, clients, other_cards.Request(), is_dual=is_dual)
        for is_dual in (False, True)
        for clients in (1, 8)
    ]
    assert speeds == sorted(speeds)


@pytest.mark.parametrize("gpu", ["NVIDIA A10", "None"])
def test_a_card_without_figures_is_refused(gpu: str) -> None:
    with pytest.raises(other_cards.BenchmarkError, match="wanted one of H100, H200"):
        other_cards.kinds_of(run_of(gpu, "llada"))

# SPDX-License-Identifier: Apache-2.0
"""benchmarks/kernels/bench_attention.py: what a case asks for, and what it says without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import bench_attention
from benchmarks.kernels.bench_attention import Case


@pytest.mark.parametrize("keys", [5, 9])
def test_heads_and_layout_fit_together(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    monkeypatch.setattr(bench_attention, "random", lambda *shape: torch.randn(*shape))
    monkeypatch.setattr(bench_attention, "DEVICE", "cpu")
    case = Case("dream", num_sequences=2, num_queries=5, num_keys=keys)
    q, k, v = case.heads()
    assert q.shape == (10, 28, 128) and k.shape == v.shape == (2 * keys, 4, 128)
    layout = case.layout()
    assert layout.query_ends.tolist() == [0, 5, 10]
    assert layout.spans is not None and layout.spans[-1].kv_end == len(k)


def test_windows_read_every_page_of_a_store_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_attention, "random", lambda *shape: torch.randn(*shape))
    monkeypatch.setattr(bench_attention, "DEVICE", "cpu")
    case = Case("dream", num_sequences=2, num_queries=5, num_keys=128)
    assert case.is_window
    q, k, v = case.stored_heads()
    assert q.shape == (10, 28, 128) and len(k) == len(v) + 64 == 2 * 2 * 128
    rows = case.pages().rows_of(0, 256)
    stored = torch.cat([rows, rows + 64])  # keys, and values a page behind them
    assert stored.sort().values.tolist() == list(range(512))
    assert not Case("dream", 1, 128, 128).is_window
    assert not Case("dream", 1, 5, 100).is_window


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        bench_attention.main([])
    assert stop.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""The server with many clients: the counts, and one run with a tiny model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serve_throughput, server_process
from benchmarks.serve_throughput import (
    Row,
    body_of,
    parse_arguments,
)
from benchmarks.shapes import Shape
from tests.checkpoints import make_checkpoint
from tests.server.process import ServerProcess


def test_a_row_counts_tokens_and_requests_and_orders_latencies() -> None:
    answers = [(10, 0.1 * i) for i in range(1, 101)]
    row = Row.of("server", 4, answers, seconds=20.0)
    assert (row.num_requests, row.num_tokens) == (100, 1000)
    assert (row.requests_per_s, row.tokens_per_s) == (5.0, 50.0)
    assert row.p50_s == pytest.approx(5.05)
    assert row.p90_s == pytest.approx(9.01)
    assert row.p99_s == pytest.approx(9.901)


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("llada", {"cache": "none", "algorithm": "semi_ar", "steps": 16}),
        ("sdar", {"cache": "exact", "steps": 16}),
    ],
)
def test_clients_of_block_causal_families_leave_the_rule_to_the_server(
    family: str, own: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family=family, seed=3)
    shape = Shape.of(json.loads((folder / "config.json").read_text()))
    options = parse_arguments(["--model", str(folder)])
    canvas = {"gen_length": 32, "block_length": 32, "temperature": 0.0}
    assert body_of([1, 2], shape, options) == {"prompt": [1, 2], **canvas, **own}


@contextmanager
def forked(
    command: list[str], log: Path, *, port: int, variables: dict[str, str]
) -> Iterator[ServerProcess]:
    """Start the same server as a fork of a process that has imported vLLM."""
    server = ServerProcess(command, log, port=port, **variables)
    try:
        yield server
    finally:
        server.kill()


def test_loop_and_server_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "ServerProcess", forked)
    folder = make_checkpoint(tmp_path / "model", family="llada", seed=3)
    arguments = ["--model", str(folder), "--dtype", "float32", "--clients", "1", "3"]
    numbers = ["--requests", "6", "--plain-requests", "3", "--gen-length", "16", "--steps", "8"]
    out = ["--block-length", "8", "--output-dir", str(tmp_path)]
    assert serve_throughput.main([*arguments, *numbers, *out]) == 0
    rows = json.loads((tmp_path / "serve_throughput.json").read_text())["rows"]
    actual = [(row["system"], row["num_clients"], row["num_requests"]) for row in rows]
    assert actual == [("plain loop", 1, 3), ("server", 1, 6), ("server", 3, 6)]
    assert rows[1]["num_tokens"] == rows[2]["num_tokens"]  # from the same answers
    assert all(0 < row["p50_s"] <= row["p90_s"] <= row["p99_s"] for row in rows)
    assert (tmp_path / "serve_throughput.png").read_bytes().startswith(b"\x89PNG")

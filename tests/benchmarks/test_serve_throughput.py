# SPDX-License-Identifier: Apache-2.0
"""The server under many clients: what is counted, and one run with a tiny model."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import serve_throughput, server_process
from benchmarks.serve_throughput import (
    Row,
    body_of,
    measure,
    parse_arguments,
    stop_ids_of,
    up_to_stop,
)
from benchmarks.shapes import Shape
from tests.checkpoints import EOS_ID, EOT_ID, make_checkpoint
from tests.server.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_a_row_counts_tokens_and_requests_and_orders_latencies() -> None:
    answers = [(10, 0.1 * i) for i in range(1, 101)]
    row = Row.of("server", 4, answers, seconds=20.0)
    assert (row.num_requests, row.num_tokens) == (100, 1000)
    assert (row.requests_per_s, row.tokens_per_s) == (5.0, 50.0)
    assert row.p50_s == pytest.approx(5.05)
    assert row.p90_s == pytest.approx(9.01)
    assert row.p99_s == pytest.approx(9.901)


def test_every_prompt_is_sent_once_by_as_many_clients_as_asked_for() -> None:
    sent: list[tuple[int, ...]] = []
    together: list[int] = []
    barrier = threading.Barrier(3)
    open_now = 0
    lock = threading.Lock()

    def send(prompt: list[int]) -> list[int]:
        nonlocal open_now
        if prompt == [-1]:
            return []
        with lock:
            open_now += 1
            together.append(open_now)
        barrier.wait(10)  # goes on when three clients wait for an answer
        with lock:
            open_now -= 1
            sent.append(tuple(prompt))
        return prompt

    class Prompts(list):  # type: ignore[type-arg]
        def __getitem__(self, key: object) -> list[list[int]]:
            return [[-1]]  # of the warm-up

    row = measure("server", 3, send, Prompts([[i] * i for i in range(9)]))
    assert sorted(sent) == sorted(tuple([i] * i) for i in range(9))
    assert (row.num_requests, row.num_tokens, row.num_clients) == (9, sum(range(9)), 3)
    assert max(together) == 3


def test_the_clock_of_a_row_starts_after_the_warm_up() -> None:
    calls: list[float] = []

    def send(prompt: list[int]) -> list[int]:
        calls.append(time.perf_counter())
        return prompt

    before = time.perf_counter()
    row = measure("plain loop", 1, send, [[1], [2], [3]])
    assert len(calls) == serve_throughput.WARM_UP + 3
    assert row.seconds < time.perf_counter() - before


def test_an_answer_ends_before_its_first_stop_token() -> None:
    assert up_to_stop([5, 6, 7, 8], {7, 6}) == [5]
    assert up_to_stop([5, 6], {9}) == [5, 6]
    assert up_to_stop([], {9}) == []


def test_stop_tokens_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family="llada", seed=3)
    config = json.loads((folder / "config.json").read_text())
    assert stop_ids_of(folder, config) == {EOS_ID, EOT_ID}


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


def test_stop_ids_of_generation_config_end_answers_too(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert stop_ids_of(tmp_path, {"eos_token_id": 9}) == {7, 8, 9}
    assert stop_ids_of(tmp_path, {}) == {7, 8}


@contextmanager
def forked(
    command: list[str], log: Path, *, port: int, variables: dict[str, str]
) -> Iterator[ServerProcess]:
    """The same server as a fork of a process that has imported it all."""
    server = ServerProcess(command, log, port=port, **variables)
    try:
        yield server
    finally:
        server.kill()


@pytest.mark.slow
def test_loop_and_server_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "ServerProcess", forked)
    folder = make_checkpoint(tmp_path / "model", family="llada", seed=3)
    arguments = ["--model", str(folder), "--dtype", "float32", "--clients", "1", "3"]
    numbers = ["--requests", "6", "--plain-requests", "3", "--gen-length", "16", "--steps", "8"]
    out = ["--block-length", "8", "--output-dir", str(tmp_path)]
    assert serve_throughput.main([*arguments, *numbers, *out]) == 0
    rows = json.loads((tmp_path / "serve_throughput.json").read_text())["rows"]
    found = [(row["system"], row["num_clients"], row["num_requests"]) for row in rows]
    assert found == [("plain loop", 1, 3), ("server", 1, 6), ("server", 3, 6)]
    assert rows[1]["num_tokens"] == rows[2]["num_tokens"]  # the same answers
    assert all(0 < row["p50_s"] <= row["p90_s"] <= row["p99_s"] for row in rows)
    assert (tmp_path / "serve_throughput.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_arguments_are_refused() -> None:
    for arguments in ([], ["--family", "llada", "--clients", "0"], ["--model", "x", "--family"]):
        with pytest.raises(SystemExit) as caught:
            serve_throughput.parse_arguments(arguments)
        assert caught.value.code == 2

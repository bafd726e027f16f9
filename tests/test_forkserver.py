# SPDX-License-Identifier: Apache-2.0
"""The process that imports for the engine: when there is one, and what a fork of it is like."""

from __future__ import annotations

import os
import sys

import pytest

from vllm.diffusion import forkserver

SERVER = ["python", "-m", "vllm.entrypoints.api_server"]


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ([*SERVER, "--model", "m"], True),
        ([*SERVER, "--help"], False),
        ([*SERVER, "--model", "m", "--numa-bind"], False),  # binds by the program it starts
        (["python", "-m", "pytest", "vllm.entrypoints.api_server"], False),
        (["python", "script.py", "-m"], False),
    ],
)
def test_only_a_server_begins(
    words: list[str], begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    monkeypatch.setattr(forkserver, "_is_begun", False)
    monkeypatch.setattr(forkserver.multiprocessing.forkserver, "set_forkserver_preload", print)
    monkeypatch.setattr(
        forkserver.multiprocessing.forkserver, "ensure_running", lambda: started.append(True)
    )
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    forkserver.begin()
    assert not started  # the user has said how
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    monkeypatch.setattr(forkserver, "_DEVICES", ("/dev/null",))
    forkserver.begin()
    assert not started  # there is a GPU
    monkeypatch.setattr(forkserver, "_DEVICES", ())
    forkserver.begin()
    assert bool(started) == begins


def test_a_fork_has_the_environment_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the process it is forked from, which began before."""
    seen: list[str | None] = []
    process = forkserver.EngineContext().Process(
        target=lambda: seen.append(os.environ.get("MOSAIC_TEST_VALUE"))
    )
    monkeypatch.setattr(forkserver.ForkServerProcess, "start", lambda process: None)
    monkeypatch.setattr(os, "environ", {**os.environ, "MOSAIC_TEST_VALUE": "at the start"})
    process.start()
    monkeypatch.setattr(os, "environ", {"MOSAIC_TEST_VALUE": "before"})
    process.run()
    assert seen == ["at the start"]

# SPDX-License-Identifier: Apache-2.0
"""Work of a server before its imports: an early process, late modules, cached bytecode."""

import gc
import importlib
import importlib.util
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from vllm.diffusion.process import deferred_imports as late
from vllm.diffusion.process import environment
from vllm.diffusion.process import prestart as early

SERVER = ["python", "-m", "vllm.entrypoints.api_server"]


class Started:
    """A fake process, started early, whose target a test calls itself."""

    _popen = type("Popen", (), {"sentinel": 7})()

    def __init__(self, target: Any, args: tuple[Any, ...]) -> None:
        self.target, self.args, self.is_living = target, args, False

    def start(self) -> None:
        self.is_living = True

    def is_alive(self) -> bool:
        return self.is_living

    def terminate(self) -> None:
        self.is_living = False


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Started]]:
    """Return the processes that are started early, and check that they end with the program."""
    results: list[Started] = []
    at_the_end: list[Callable[[], None]] = []

    class Context:
        def Process(self, target: Any, args: tuple[Any, ...]) -> Started:
            results.append(Started(target, args))
            return results[-1]

    monkeypatch.setattr(early, "SpawnContext", Context)
    monkeypatch.setattr(early, "Finalize", lambda _, end, exitpriority: at_the_end.append(end))
    monkeypatch.setattr(sys, "orig_argv", [*SERVER, "--model", "m"])
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    yield results
    for end in at_the_end:
        end()
    assert not any(process.is_living for process in results)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> tuple[Connection, Connection]:
    """Return the reading and the writing end of the early process's pipe."""
    to_read, to_write = multiprocessing.Pipe(duplex=False)
    monkeypatch.setattr(to_read, "close", lambda: None)  # the fake process reads from it
    monkeypatch.setattr(multiprocessing, "Pipe", lambda duplex: (to_read, to_write))
    return to_read, to_write


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ([*SERVER, "--model", "m"], True),
        ([*SERVER, "--help"], False),
        ([*SERVER, "--model", "m", "--numa-bind"], False),  # binding depends on the started program
        (["python", "-m", "pytest", "vllm.entrypoints.api_server"], False),
        (["python", "script.py", "-m"], False),
    ],
)
def test_only_a_server_begins(
    words: list[str], begins: bool, begun: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    early.begin()
    assert not begun  # the user has set the start method
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD")
    early.begin()
    early.begin()
    assert [process.is_living for process in begun] == [True] * begins


@pytest.mark.parametrize("is_child", [True, False])
def test_a_missing_gpu_is_told_once(is_child: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    monkeypatch.setattr(sys, "orig_argv", ["python", *["--multiprocessing-fork"] * is_child])
    try:
        early.silence_torch_warnings()
        assert logger.isEnabledFor(logging.WARNING) != is_child
    finally:
        logger.setLevel(level)


def job(*args: Any) -> None:
    """A function for a process."""


@pytest.mark.parametrize(
    ("is_living", "devices", "is_taken"),
    [(True, "0", True), (False, "0", False), (True, "1", False)],
    ids=["waits", "has ended", "another device"],
)
def test_who_is_taken(
    is_living: bool,
    devices: str,
    is_taken: bool,
    begun: list[Started],
    pipe: tuple[Connection, Connection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    early.begin()
    (waiting,) = begun
    waiting.is_living = is_living
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    monkeypatch.setenv("MOSAIC_TEST_VALUE", "at the start")
    started: list[bool] = []
    monkeypatch.setattr(early.SpawnProcess, "start", lambda process: started.append(True))
    monkeypatch.setattr(early.SpawnProcess, "_sentinel", 8, raising=False)
    monkeypatch.setattr(threading, "Thread", mock.Mock())  # would import during later tests
    process = early.EngineContext().Process(target=job, name="EngineCore", args=(1,))
    process.start()
    assert bool(started) != is_taken
    assert waiting.is_living == is_taken
    if is_taken:
        variables, *message = pipe[0].recv()
        assert variables["MOSAIC_TEST_VALUE"] == "at the start"
        assert message == ["EngineCore", job, (1,), {}]
        assert process.sentinel == 7
    process = early.EngineContext().Process(target=job)
    process.start()
    assert len(started) == 2 - is_taken  # only one process was waiting
    waiting.terminate()


def test_it_runs_what_it_hears(
    begun: list[Started],
    pipe: tuple[Connection, Connection],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    early.begin()
    (process,), (_, to_write) = begun, pipe
    is_collected, frozen = gc.isenabled(), []
    monkeypatch.setattr(early, "_import", lambda names: frozen.append(gc.isenabled()))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append("what was imported"))
    monkeypatch.setattr(os, "environ", {"OLD": "gone"})
    name = multiprocessing.current_process().name
    to_write.send(({"A": "b"}, name, print, ("what it shall run",), {}))
    process.target(*process.args)
    assert os.environ == {"A": "b"}
    assert frozen == [False, "what was imported"]
    assert gc.isenabled() == is_collected
    assert capsys.readouterr().out == "what it shall run\n"
    to_write.close()
    process.target(*process.args)  # returns, because the server has closed the pipe


def test_nothing_is_collected_while_modules_are_imported() -> None:
    is_collecting = gc.isenabled()
    try:
        for was in (True, False):
            (gc.enable if was else gc.disable)()
            with pytest.raises(ImportError), early.without_collecting():
                assert not gc.isenabled()
                raise ImportError
            assert gc.isenabled() == was
    finally:
        (gc.enable if is_collecting else gc.disable)()


def test_the_compiler_is_imported_late_and_has_upstreams_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import env_override

    reports: list[bool] = []
    monkeypatch.setattr(
        env_override, "_patch_inductor_fallback_allow_list", lambda: reports.append(True)
    )
    monkeypatch.setattr(late, "LOWERING", "this")  # a module that is not imported yet
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with late.without_the_compiler(), pytest.raises(ImportError, match="imported later"):
        importlib.import_module("this")
    assert not reports
    finders = list(sys.meta_path)
    importlib.import_module("this")
    assert reports == [True]
    assert len(sys.meta_path) == len(finders) - 1
    with late.without_the_compiler():  # no effect, because the module is imported
        importlib.import_module("this")
    assert len(sys.meta_path) == len(finders) - 1


# ---- bytecode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_server", [True, False])
@pytest.mark.parametrize("prefix", [None, "the user's"])
@pytest.mark.parametrize("may_write", [True, False])
@pytest.mark.parametrize("has_bytecode", [True, False])
def test_a_server_keeps_bytecode_where_nothing_else_does(
    has_bytecode: bool,
    may_write: bool,
    prefix: str | None,
    is_server: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, cached, folder = (tmp_path / name for name in ("site/init.py", "site/pyc", "bytecode"))
    (tmp_path / "site").mkdir()
    if has_bytecode:
        cached.touch()
    spec = mock.Mock(origin=str(package), cached=str(cached))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", not may_write)
    monkeypatch.setattr(sys, "pycache_prefix", prefix)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    environment.keep_bytecode(is_server=is_server)
    if has_bytecode or may_write or prefix or not is_server:
        assert (sys.pycache_prefix, sys.dont_write_bytecode) == (prefix, not may_write)
        return
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # like the engine's process
    environment.keep_bytecode(is_server=False)
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (str(folder), False)
    assert os.environ["PYTHONPYCACHEPREFIX"] == str(folder)

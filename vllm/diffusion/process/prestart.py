# SPDX-License-Identifier: Apache-2.0
"""Early start of the engine's process, which imports its modules while the server imports its own.

Upstream starts the engine's process after the server has imported everything and read its
arguments; only then would the process begin to import its modules. Here it is started immediately,
imports its modules, and waits for the function to run. It is a process of the same kind as
upstream's, so code in it runs unchanged.

A user's `VLLM_WORKER_MULTIPROC_METHOD` is kept. Importing this module imports neither torch nor
upstream.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

NEEDED = (
    *("vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor"),
    *("vllm.diffusion.engine.scheduler.scheduler", "vllm.diffusion.engine.worker.worker"),
    "vllm.model_executor.layers.quantization.online.fp8",  # upstream's layers import it late
)
# Modules that the server needs once its engine is ready.
_ROUTES = ("vllm.diffusion.api.server.endpoint", "vllm.entrypoints.anthropic.serving")
_PROGRAM = "vllm.entrypoints.api_server"
# Variables that imports may have read already. If one has changed, a new process is started.
_READ_EARLY = ("CUDA_VISIBLE_DEVICES", "VLLM_PLUGINS", "VLLM_LOGGING_LEVEL")


class _Waiting(NamedTuple):
    process: Any  # a SpawnProcess
    connection: Connection
    environment: dict[str, str | None]


_waiting: list[_Waiting] = []  # at most one process, until it is used
_started_at: list[float] = []  # time.time() of every engine's start in this process


class EngineProcess(SpawnProcess):
    """Process that uses the waiting process, if there is one."""

    def start(self) -> None:
        from vllm.diffusion.process import watchdog

        waiting = _take()
        _started_at.append(time.time())
        # The server imports these modules while it waits for the engine.
        threading.Thread(target=_import, args=(_ROUTES,), daemon=True).start()
        if waiting is None:
            super().start()
        else:
            waiting.process.name = self.name
            self._popen = waiting.process._popen
            self._sentinel = self._popen.sentinel
            job = (self._target, self._args, self._kwargs)  # type: ignore[attr-defined]
            waiting.connection.send((dict(os.environ), self.name, *job))
        watchdog.follow_engine(self.sentinel)


class EngineContext(SpawnContext):
    """Multiprocessing context in which upstream starts an engine's process."""

    Process = EngineProcess


def keep_title() -> None:
    """In a child process, make sure that it can be renamed later; must run before all imports.

    A new title overwrites the arguments, which are stored before the first environment variable.
    This works only until that variable is set again.
    """
    if "--multiprocessing-fork" in sys.orig_argv:
        import setproctitle

        setproctitle.getproctitle()


def silence_torch_warnings() -> None:
    """Silence warnings about names that upstream uses and torch has renamed.

    In a child process, also silence the warning about a missing GPU, which has been reported.
    """
    names = ["torch._opaque_base", "torch._library.opaque_object"]
    if "--multiprocessing-fork" in sys.orig_argv:
        names.append("torch.utils.cpp_extension")
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)


def hide_interrupts() -> None:
    """Print no traceback when Ctrl-C ends this program, if it is the server."""
    if not serves(sys.orig_argv):
        return

    def print_others(kind: type[BaseException], *of_error: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, *of_error)

    sys.excepthook = print_others


def begin() -> None:
    """Start importing for the engine if this program is the server; must run before all imports."""
    is_wanted = "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ and serves(sys.orig_argv)
    if _waiting or not is_wanted or multiprocessing.parent_process() is not None:
        return
    to_read, to_write = multiprocessing.Pipe(duplex=False)
    process = SpawnContext().Process(target=_wait, args=(to_read,))
    # A terminal sends Ctrl-C to both processes. The new process inherits the handler that ignores
    # it, and the server ends the process.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    process.start()
    signal.signal(signal.SIGINT, handler)
    to_read.close()
    _waiting.append(_Waiting(process, to_write, _read_early()))
    # It must run before this process waits for its children.
    Finalize(None, _end_waiting_process, exitpriority=100)


def use_waiting_process() -> None:
    """Make upstream use the waiting process."""
    if _waiting:
        from vllm.v1.engine import utils

        utils.get_mp_context = EngineContext


def engine_started_at() -> float | None:
    """Return time.time() when the first engine got its function; None if upstream starts it."""
    return _started_at[0] if _started_at else None


def _take() -> _Waiting | None:
    """Return the waiting process if it is alive and its environment is unchanged."""
    waiting = _waiting.pop() if _waiting else None
    if waiting is None:
        return None
    if waiting.process.is_alive() and waiting.environment == _read_early():
        return waiting
    waiting.process.terminate()
    return None


def _end_waiting_process() -> None:
    """End a waiting process that no engine uses."""
    while _waiting:
        _waiting.pop().process.terminate()


def _read_early() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in _READ_EARLY}


@contextmanager
def without_collecting() -> Iterator[None]:
    """Disable garbage collection during imports, of which it takes a sixth of the time."""
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_collecting:
            gc.enable()


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        importlib.import_module(name)


def _wait(connection: Connection) -> None:
    """Run in the engine's process: import modules, receive the function, and run it."""
    with without_collecting():
        _import(NEEDED)
        # Later collections, some of which upstream requests, skip these objects.
        gc.freeze()
    try:
        environment, name, target, args, kwargs = connection.recv()
    except EOFError:  # the server has ended earlier
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.current_process().name = name
    if "OMP_NUM_THREADS" in environment:  # torch has read the old value already
        import torch

        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    target(*args, **kwargs)


def serves(words: list[str]) -> bool:
    """Return whether a command line runs our server, not only its help."""
    if "-m" not in words or words[words.index("-m") + 1 :][:1] != [_PROGRAM]:
        return False
    return not {"-h", "--help", "--version", "--numa-bind"}.intersection(words)

# SPDX-License-Identifier: Apache-2.0
"""The engine's process is a fork of one that imports what it needs while the server imports.

Python starts a process anew by importing everything again: first the server imports its part, then
the engine its own. Here a process that does nothing else (Python's forkserver) begins to import
before the server does. The engine is forked from it, without threads.

Not where there is a GPU: what is imported asks the device, and no fork of a process that has may use
it. A `VLLM_WORKER_MULTIPROC_METHOD` of the user's is kept to. Nothing here imports upstream.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess

PRELOADED = "vllm.diffusion.engine.preload"
_PROGRAM = "vllm.entrypoints.api_server"
_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # one of them is where a GPU is
_is_begun = False


class EngineProcess(ForkServerProcess):
    """A process with the environment that it would have, had it been started here and now."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        if "OMP_NUM_THREADS" in os.environ:  # torch has read that of the process it is forked from
            import torch

            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super().run()


class EngineContext(ForkServerContext):
    """What upstream starts an engine's process with."""

    Process = EngineProcess


def begin() -> None:
    """Start importing for the engine, if this program is the server. Called before all imports."""
    global _is_begun
    is_wanted = "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ and _serves(sys.orig_argv)
    has_gpu = any(os.path.exists(device) for device in _DEVICES)
    if _is_begun or not is_wanted or has_gpu or multiprocessing.parent_process() is not None:
        return
    _is_begun = True
    multiprocessing.forkserver.set_forkserver_preload([PRELOADED])
    multiprocessing.forkserver.ensure_running()


def adopt() -> None:
    """Let upstream fork engines from there, if it was begun."""
    if not _is_begun:
        return
    import torch

    if torch.accelerator.is_available():
        return
    from vllm.v1.engine import utils

    utils.get_mp_context = EngineContext


def _serves(words: list[str]) -> bool:
    """Whether a command line runs our server, and not only for its help."""
    if "-m" not in words or words[words.index("-m") + 1 :][:1] != [_PROGRAM]:
        return False
    return not {"-h", "--help", "--version", "-v", "--numa-bind"}.intersection(words)

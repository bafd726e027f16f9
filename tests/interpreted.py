# SPDX-License-Identifier: Apache-2.0
"""Triton kernels on the CPU, by Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROOT = Path(__file__).resolve().parents[1]
_ENVIRONMENT = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
_OURS = ("gather_gemm", "tests", "triton", "vllm.diffusion")  # kernels, and what imports them
_TIMEOUT_S = 300


def run_interpreted(program: str) -> None:
    """Run Python in a process of its own, since Triton decides at import.

    A fork knows all other modules, which take longer to import than most programs to run.
    """
    if threading.active_count() > 1 or torch.cuda.is_initialized():
        _run_afresh(program)
        return
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_run_here, args=(program, theirs))
    child.start()
    theirs.close()
    told = ours.recv() if ours.poll(_TIMEOUT_S) else "it took too long"
    child.kill()
    child.join()
    assert not told, told


def _run_here(program: str, to: Connection) -> None:
    """Import anew what knows of Triton, run, and tell what went wrong."""
    told = ""
    os.environ.update(_ENVIRONMENT)
    for name in list(sys.modules):
        is_ours = any(name == own or name.startswith(f"{own}.") for own in _OURS)
        if is_ours and not name.startswith("triton._C"):  # native modules are loaded once
            del sys.modules[name]
    try:
        exec(program, {"__name__": "interpreted"})
    except BaseException:
        told = traceback.format_exc()
    to.send(told)
    os._exit(0)


def _run_afresh(program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | _ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr

# SPDX-License-Identifier: Apache-2.0
"""Triton kernels on the CPU, run by Triton's interpreter.

The interpreter is slow. Its tests are therefore skipped if the code of the kernels, of their
references and of the tests has not changed since they last passed. interpreted.sha256 holds the
digest of that code; `pytest --write-golden tests/native/test_interpreter.py` runs the tests and
writes it.
"""

import json
import os
import select
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.digests import digest_of

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 300
_DIGEST = Path(__file__).with_suffix(".sha256")
_SOURCES = (
    *("gather_gemm/*.py", "vllm_add_llada/**/*.py", "vllm/diffusion/layers/split_attention/*.py"),
    *("vllm/diffusion/guided/*.py", "vllm/diffusion/core/*.py", "tests/interpreted.py"),
    *("tests/pages.py", "tests/native/support.py", "tests/native/test_interpreter.py"),
    *("tests/models/split_kernel.py", "tests/guided/support.py", "tests/guided/joint_kernels.py"),
    *("vllm/diffusion/layers/gemma_*.py", "tests/models/gemma_rows.py"),
)

# Triton chooses the interpreter at import, so that the programs need their own process. Each
# program runs in a fork of it, because most programs take less time than the imports. The process
# ends when its standard input is closed. The interpreter replaces Triton's language at every call
# of a function in a kernel, such as `tl.sum`; once is enough.
_SERVER = """
import gc, json, os, sys, traceback
gc.disable()
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter
from vllm.diffusion import ops
interpreter._patch_lang(lambda: (tl, core))
interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
gc.freeze()
gc.enable()
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    to_read, to_write = os.pipe()
    child = os.fork()
    if not child:
        error = b""
        try:
            exec(json.loads(line), {"__name__": "interpreted"})
        except BaseException:
            error = traceback.format_exc().encode()
        os.write(to_write, error[-60000:])
        os._exit(0)
    os.close(to_write)
    with open(to_read, "rb") as pipe:
        error = pipe.read().decode(errors="replace")
    status = os.waitpid(child, 0)[1]
    print(json.dumps(error or (f"status {status}" if status else "")), file=answers, flush=True)
"""


def run_interpreted(program: str) -> None:
    """Run a Python program in which Triton's kernels are interpreted."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(program) + "\n")
    server.stdin.flush()
    is_readable, _, _ = select.select([server.stdout], [], [], _TIMEOUT_S)
    if not is_readable:
        server.kill()
    answer = server.stdout.readline()
    assert answer, "the process that runs programs has ended"
    message = json.loads(answer)
    assert not message, message


def is_up_to_date() -> bool:
    """Return whether the code is the same as when the tests last passed."""
    return _DIGEST.exists() and _DIGEST.read_text(encoding="utf-8").strip() == digest()


def write_digest() -> None:
    _DIGEST.write_text(digest() + "\n", encoding="utf-8")


def digest() -> str:
    """Return a digest of the code of the kernels, their references and the tests."""
    return digest_of(path for pattern in _SOURCES for path in ROOT.glob(pattern))


@cache
def _server() -> subprocess.Popen[str]:
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        env=os.environ | environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

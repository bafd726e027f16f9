# SPDX-License-Identifier: Apache-2.0
"""Triton kernels on the CPU, by Triton's interpreter."""

import json
import os
import select
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_TIMEOUT_S = 300

# Triton decides at import, so a process of its own runs the programs: each in a fork of it, as most
# of them take less time than the imports. It ends with its standard input.
# The interpreter replaces Triton's language anew at every call of a function within a kernel, such
# as `tl.sum`; once is enough.
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
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        told = b""
        try:
            exec(json.loads(line), {"__name__": "interpreted"})
        except BaseException:
            told = traceback.format_exc().encode()
        os.write(theirs, told[-60000:])
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as told:
        found = told.read().decode(errors="replace")
    status = os.waitpid(child, 0)[1]
    print(json.dumps(found or (f"status {status}" if status else "")), file=answers, flush=True)
"""


def run_interpreted(program: str) -> None:
    """Run Python where Triton's kernels are interpreted."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(program) + "\n")
    server.stdin.flush()
    is_told, _, _ = select.select([server.stdout], [], [], _TIMEOUT_S)
    if not is_told:
        server.kill()
    answer = server.stdout.readline()
    assert answer, "the process that runs programs has ended"
    message = json.loads(answer)
    assert not message, message


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

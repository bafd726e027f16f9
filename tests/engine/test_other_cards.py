# SPDX-License-Identifier: Apache-2.0
"""Whole steps use our portable kernels when the engine is restricted to those of other GPUs."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.programs import ROOT, output_of

SIZES = {"d_model": 256, "mlp_hidden_size": 512, "n_heads": 4, "n_kv_heads": 4}
# Names of kernels from libraries for matrix products and attention.
FOREIGN = re.compile(r"cublas|cudnn|cutlass|nvjet|xmma|sm\d\d_|gemv|splitK", re.IGNORECASE)
STEPS = """
import sys
from torch.profiler import ProfilerActivity, profile
from tests.engine.harness import Request, running

folder, dtype, quantization = sys.argv[1:]
ask = Request(list(range(5, 29)), {"gen_length": 8, "block_length": 8, "steps": 4})
chosen = {"quantization": quantization} if quantization else {}
with running(folder, dtype=dtype, enforce_eager=True, max_num_seqs=8, **chosen) as engine:
    engine.ask(ask)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.ask(ask)
        engine.ask(*[ask] * 8)
print(*sorted({event.name for event in seen.events()}), sep="\\n")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("card", "family", "dtype", "quantization"),
    [
        ("8.0", "llada", "bfloat16", ""),
        ("8.6", "llada", "float16", ""),
        ("8.6", "llada", "bfloat16", "int4"),
        ("8.9", "llada", "bfloat16", "fp8"),
        ("8.0", "moe", "bfloat16", ""),
    ],
)
def test_up_to_256_rows_meet_our_kernels_alone(
    card: str,
    family: str,
    dtype: str,
    quantization: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DLLM_KERNELS", card)
    sizes = SIZES if family == "llada" else {}
    folder = make_checkpoint(tmp_path, family=family, seed=3, dtype=torch.bfloat16, **sizes)
    names = output_of(
        *(sys.executable, "-c", STEPS, folder, dtype, quantization), cwd=ROOT
    ).splitlines()
    assert any("portable" in name for name in names)
    assert [name for name in names if FOREIGN.search(name)] == []

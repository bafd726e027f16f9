# SPDX-License-Identifier: Apache-2.0
"""A variable leaves DiffusionGemma to vLLM's own model."""

import os
from pathlib import Path

import pytest

from tests.gemma import make_gemma
from tests.programs import run_python

# Prints the classes that serve a checkpoint, or the reason why nothing does.
CONFIGURES = """
import sys
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
if sys.argv[2] == "kernels":
    type(current_platform).has_compiled_kernels = True
try:
    config = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True).create_engine_config()
except Exception as error:
    print("ERROR", type(error).__name__, str(error).splitlines()[0])
else:
    print("CONFIG", type(config.model_config.hf_config).__module__)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("gemma"))


def configured(folder: Path, value: str, installation: str = "") -> str:
    env = {**os.environ, "VLLM_DLLM_UPSTREAM_GEMMA": value}
    done = run_python("-c", CONFIGURES, folder, installation, env=env)
    lines = done.stdout.splitlines()
    return next(line for line in lines if line.startswith(("ERROR", "CONFIG")))


def test_mosaic_serves_it_by_default(folder: Path) -> None:
    assert configured(folder, "0") == "CONFIG vllm.diffusion.models.diffusion_gemma"


def test_refused_without_compiled_kernels(folder: Path) -> None:
    line = configured(folder, "1")
    assert line.startswith("ERROR ServerConfigError VLLM_DLLM_UPSTREAM_GEMMA: given 1; wanted 0")
    assert line.endswith("this installation has none")


def test_left_to_upstream(folder: Path) -> None:
    """Upstream looks at its own class, which cannot be imported without its kernels."""
    line = configured(folder, "1", "kernels")
    assert "ServerConfigError" not in line and "vllm.diffusion" not in line

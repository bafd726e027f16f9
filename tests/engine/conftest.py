# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and engines of the engine tests. An engine lives for at most one module."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reference.models import LLaDAReference, load_reference

from tests.engine.harness import Engine, running

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LLAMA |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
LLAMA |= {"torch_dtype": "float32", "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(scope="module")
def engine(checkpoint: Callable[[str], Path]) -> Iterator[Engine]:
    with running(checkpoint("mha")) as engine:
        yield engine


@pytest.fixture(scope="module")
def model(checkpoint: Callable[[str], Path]) -> LLaDAReference:
    return load_reference(checkpoint("mha"))


@pytest.fixture(params=[False, True], ids=["step by step", "ahead"])
def runs_ahead(
    request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Return whether a step is launched before the results of the previous step are returned."""
    monkeypatch.setattr(engine.loop, "runs_ahead", request.param)
    return bool(request.param)


@pytest.fixture(params=["1", "0"], ids=["fused", "apart"])
def fuses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a finished block is stored together with the next block."""
    monkeypatch.setenv("VLLM_DLLM_COMMIT_FUSION", request.param)
    return bool(request.param == "1")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path

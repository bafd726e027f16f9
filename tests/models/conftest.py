# SPDX-License-Identifier: Apache-2.0
"""Loaded models, shared by the tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

from tests.checkpoints import Case, make_case
from tests.models.support import engine_config, join_world, load
from vllm.diffusion.models.base import DiffusionModel


@pytest.fixture(scope="package")
def load_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Yield a function that loads a checkpoint in this process, without other ranks."""
    init_file = tmp_path_factory.mktemp("world") / "init"

    def load_from(path: Path, dtype: str = "float32", **engine_args: Any) -> DiffusionModel:
        config = engine_config(path, dtype, **engine_args)
        join_world(config, init_file)
        return load(config)

    yield load_from
    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(scope="package")
def case_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a tiny checkpoint of `tests.checkpoints` or OUR_CASES."""
    root = tmp_path_factory.mktemp("checkpoints")

    def path_of(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else make_case(folder, name, OUR_CASES)

    return path_of


# These shapes only matter to parallel layers: a number of columns that is no multiple of upstream's
# padding, and fewer key/value heads than ranks.
LLADA_CASES: dict[str, Case] = {
    "odd_vocab": Case(20, {"embedding_size": 300}),
    "odd_vocab_tied": Case(20, {"embedding_size": 300, "weight_tying": True}),
    "one_kv_head": Case(20, {"n_kv_heads": 1, "attention_layer_norm": True}),
    "all_biases": Case(20, {"include_bias": True, "embedding_size": 300, "n_kv_heads": 2}),
}
ODD_TIED = {"vocab_size": 300, "num_key_value_heads": 1, "tie_word_embeddings": True}
MIXED = {"moe_layer_freq": [0, 1, 1], "moe_router_enable_expert_bias": True, "vocab_size": 300}
CLIPPED = {"partial_rotary_factor": 0.5, "clip_qkv": 0.5, "num_key_value_heads": 2}
OUR_CASES: dict[str, Case] = {
    **LLADA_CASES,
    "dream_odd_vocab": Case(20, {"vocab_size": 300, "num_key_value_heads": 4}, "dream"),
    "dream_odd_tied": Case(20, ODD_TIED, "dream"),
    # The widths of the heads do not sum up to the hidden size.
    "dream_wide_heads": Case(20, {"head_dim": 32}, "dream"),
    "moe_narrow_heads": Case(20, {"head_dim": 8, "num_key_value_heads": 2}, "moe"),
    # Half of a head's channels are rotated, and most elements of q, k and v are clipped.
    "moe_partial_clipped": Case(20, CLIPPED, "moe"),
    "moe_plain_heads_tied": Case(20, {"qk_layernorm": False, "tie_word_embeddings": True}, "moe"),
    "moe_fused_mix": Case(20, MIXED, "moe", fused_experts=True),
    "moe_all_dense": Case(20, {"moe_layer_freq": [0, 0, 0]}, "moe"),
    "moe_one_expert": Case(20, {"num_experts": 5, "num_experts_per_tok": 1}, "moe"),
    "moe_all_experts": Case(20, {"num_experts": 3, "num_experts_per_tok": 3}, "moe"),
}


@pytest.fixture(scope="package")
def case_model(
    load_model: Callable[..., Any], case_path: Callable[[str], Path]
) -> Callable[[str], DiffusionModel]:
    """Return a function that loads the fp32 model of a case, each case once."""
    models: dict[str, DiffusionModel] = {}

    def model_of(name: str) -> DiffusionModel:
        if name not in models:
            models[name] = load_model(case_path(name))
        return models[name]

    return model_of

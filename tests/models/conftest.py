# SPDX-License-Identifier: Apache-2.0
"""Loaded models, shared by the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

from tests.checkpoints import BLOCK_CASES, CASES, FAMILY_CASES, Case, make_case, make_checkpoint
from tests.models.support import engine_config, join_world, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from vllm.diffusion.models.base import DiffusionModel


@pytest.fixture(scope="package")
def load_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Load a checkpoint folder in this process, a tensor-parallel world of one."""
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
    """The folder of one of the tiny checkpoints of `tests.checkpoints`, or of ours."""
    root = tmp_path_factory.mktemp("checkpoints")

    def path_of(name: str) -> Path:
        folder = root / name
        if folder.exists():
            return folder
        if name in {**CASES, **FAMILY_CASES, **BLOCK_CASES, "diffullama": None}:
            return make_case(folder, name)
        if name in OUR_CASES:
            return make_checkpoint(folder, seed=20, **OUR_CASES[name])
        case = OUR_FAMILY_CASES[name]
        return make_checkpoint(
            folder,
            family=case.family,
            seed=case.seed,
            fused_experts=case.fused_experts,
            **case.overrides,
        )

    return path_of


# Shapes that only matter to parallel layers: columns that are no multiple of upstream's padding,
# and fewer key/value heads than ranks.
OUR_CASES: dict[str, dict[str, Any]] = {
    "odd_vocab": {"embedding_size": 300},
    "odd_vocab_tied": {"embedding_size": 300, "weight_tying": True},
    "one_kv_head": {"n_kv_heads": 1, "attention_layer_norm": True},
    "all_biases": {"include_bias": True, "embedding_size": 300, "n_kv_heads": 2},
}

OUR_FAMILY_CASES: dict[str, Case] = {
    "dream_odd_vocab": Case(20, {"vocab_size": 300, "num_key_value_heads": 4}, "dream"),
    "dream_odd_tied": Case(
        20,
        {"vocab_size": 300, "num_key_value_heads": 1, "tie_word_embeddings": True},
        "dream",
    ),
    # heads whose widths do not sum up to the hidden size
    "dream_wide_heads": Case(20, {"head_dim": 32}, "dream"),
    "moe_narrow_heads": Case(20, {"head_dim": 8, "num_key_value_heads": 2}, "moe"),
    # half of a head's channels turn; most elements of q, k and v are clipped
    "moe_partial_clipped": Case(
        20, {"partial_rotary_factor": 0.5, "clip_qkv": 0.5, "num_key_value_heads": 2}, "moe"
    ),
    "moe_plain_heads_tied": Case(20, {"qk_layernorm": False, "tie_word_embeddings": True}, "moe"),
    "moe_fused_mix": Case(
        20,
        {"moe_layer_freq": [0, 1, 1], "moe_router_enable_expert_bias": True, "vocab_size": 300},
        "moe",
        fused_experts=True,
    ),
    "moe_all_dense": Case(20, {"moe_layer_freq": [0, 0, 0]}, "moe"),
    "moe_one_expert": Case(20, {"num_experts": 5, "num_experts_per_tok": 1}, "moe"),
    "moe_all_experts": Case(20, {"num_experts": 3, "num_experts_per_tok": 3}, "moe"),
}


@pytest.fixture(scope="package")
def case_model(
    load_model: Callable[..., Any], case_path: Callable[[str], Path]
) -> Callable[[str], DiffusionModel]:
    """The loaded fp32 model of a case; each is loaded once."""
    models: dict[str, DiffusionModel] = {}

    def model_of(name: str) -> DiffusionModel:
        if name not in models:
            models[name] = load_model(case_path(name))
        return models[name]

    return model_of

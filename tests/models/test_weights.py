# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that do not match their configuration."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import (
    BLOCK_CASES,
    CASES,
    FAMILY_CASES,
    config_of,
    fuse_experts,
    random_weights,
)
from tests.models.conftest import OUR_CASES
from vllm.diffusion.core.errors import CheckpointError
from vllm.diffusion.models.base import DiffusionModel

BLOCK = "model.transformer.blocks.1"
HEAD = "model.transformer.ff_out"


@pytest.fixture(scope="module")
def scratch_model(
    load_model: Callable[..., Any], case_path: Callable[[str], Path]
) -> Callable[[str], DiffusionModel]:
    """Return a function that makes models for this module alone, because loading changes them."""
    return functools.cache(lambda name: load_model(case_path(name), load_format="dummy"))


def weights_of(name: str) -> dict[str, Tensor]:
    case = {**CASES, **FAMILY_CASES, **BLOCK_CASES, **OUR_CASES}[name]
    weights = random_weights(config_of(case.family, **case.overrides), seed=40)
    return fuse_experts(weights) if case.fused_experts else weights


LLADA_NAMES = ["mha", "tied", "all_biases", "qk_norm", "grouped"]


@pytest.mark.parametrize(
    "name",
    [
        *(*LLADA_NAMES, "dream", "dream_tied", "moe_bias", "moe_fused_mix", "moe_all_dense"),
        *BLOCK_CASES,
    ],
)
def test_all_tensors_in_any_order(
    name: str, scratch_model: Callable[[str], DiffusionModel]
) -> None:
    model = scratch_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    loaded = model.load_weights(reversed(weights_of(name).items()))
    assert loaded == {key for key, _ in model.named_parameters()}
    assert all(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("name", "missing", "listed"),
    [
        *(
            ("all_biases", missing, None)
            for missing in (
                "model.transformer.wte.weight",
                "model.transformer.ln_f.weight",
                f"{HEAD}.weight",
                f"{HEAD}.bias",
                f"{BLOCK}.attn_norm.weight",
                f"{BLOCK}.k_proj.weight",  # part of a fused matrix
                f"{BLOCK}.v_proj.bias",
                f"{BLOCK}.up_proj.weight",
                f"{BLOCK}.ff_out.weight",  # has the same last name as the head
            )
        ),
        ("dream", "model.embed_tokens.weight", None),
        ("dream", "model.layers.2.self_attn.k_proj.bias", None),
        ("dream", "lm_head.weight", None),
        ("sdar", "model.layers.2.self_attn.k_norm.weight", None),
        ("llada2", "model.word_embeddings.weight", None),
        ("llada2", "model.layers.0.attention.query_key_value.weight", None),
        ("llada2", "model.layers.1.attention.query_layernorm.weight", None),
        ("llada2", "model.layers.2.mlp.gate.expert_bias", None),
        ("llada2", "model.layers.2.mlp.shared_experts.gate_proj.weight", None),
        ("llada2", f"{EXPERTS}.3.down_proj.weight", None),
        ("sdar_moe", f"{EXPERTS}.3.down_proj.weight", None),
        ("moe", "model.layers.2.self_attn.q_norm.weight", None),
        ("moe", "model.layers.0.mlp.gate.weight", None),
        ("moe", f"{EXPERTS}.7.up_proj.weight", None),
        ("moe", f"{EXPERTS}.0.down_proj.weight", None),
        ("moe_bias", "model.layers.1.mlp.expert_bias", None),
        ("moe_dense_mix", "model.layers.1.mlp.down_proj.weight", None),
        ("moe_fused", "model.layers.1.mlp.w1", f"{EXPERTS}.0.gate_proj.weight"),
        ("moe_fused", "model.layers.1.mlp.w2", f"{EXPERTS}.0.down_proj.weight"),
    ],
)
def test_missing_tensors_are_named(
    name: str, missing: str, listed: str | None, scratch_model: Callable[[str], DiffusionModel]
) -> None:
    weights = weights_of(name)
    del weights[missing]
    with pytest.raises(CheckpointError, match="missing") as refused:
        scratch_model(name).load_weights(weights.items())
    assert (listed or missing) in str(refused.value)


@pytest.mark.parametrize("kind", ["inv_freq", "cos_cached", "sin_cached"])
@pytest.mark.parametrize(
    ("name", "module"),
    [("mha", BLOCK), ("dream", "model.layers.0.self_attn"), ("stable_diffcoder", "model.layers.0")],
)
def test_buffers_of_rotary_embeddings_are_left_out(
    name: str, module: str, kind: str, scratch_model: Callable[[str], DiffusionModel]
) -> None:
    """Checkpoints from the time of Llama 2 contain these buffers, which config.json determines."""
    model = scratch_model(name)
    weights = {**weights_of(name), f"{module}.rotary_emb.{kind}": torch.ones(16)}
    assert model.load_weights(weights.items()) == {key for key, _ in model.named_parameters()}
    with pytest.raises(CheckpointError, match="not part of the model"):
        model.load_weights({**weights, f"{module}.rotary_emb.weight": torch.ones(16)}.items())


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("mha", f"{BLOCK}.q_proj.bias"),
        ("mha", f"{BLOCK}.q_norm.weight"),
        ("mha", f"{BLOCK}.att_proj.weight"),
        ("mha", "model.transformer.wpe.weight"),
        ("mha", "model.transformer.blocks.3.ff_out.weight"),
        ("mha", "model.transformer.block_groups.0.0.ff_out.weight"),
        ("mha", "lm_head.weight"),
        ("dream", "model.layers.0.self_attn.o_proj.bias"),
        ("dream", "model.layers.0.self_attn.q_norm.weight"),
        ("dream", "model.layers.0.mlp.gate.weight"),
        ("sdar", "model.layers.0.self_attn.q_proj.bias"),
        ("llada2", "model.layers.0.attention.query_key_value.bias"),
        ("llada2", "model.layers.0.attention.dense.bias"),
        ("llada2", "model.layers.0.mlp.gate.weight"),
        ("llada2", "model.layers.1.mlp.expert_bias"),
        ("llada2_all_experts", "model.layers.1.mlp.shared_experts.up_proj.weight"),
        ("sdar_moe", "model.layers.1.mlp.gate.expert_bias"),
        ("moe", "model.layers.0.self_attn.q_proj.bias"),
        ("moe", "model.layers.0.mlp.expert_bias"),
        ("moe", "model.layers.0.mlp.shared_experts.up_proj.weight"),
        ("moe", "model.layers.0.mlp.gate_proj.weight"),
        ("moe", f"{EXPERTS}.8.up_proj.weight"),
        ("moe_dense_mix", f"{EXPERTS}.0.up_proj.weight"),
    ],
)
def test_unknown_tensors_are_named(
    name: str, unknown: str, scratch_model: Callable[[str], DiffusionModel]
) -> None:
    weights = {**weights_of(name), unknown: torch.zeros(64)}
    with pytest.raises(CheckpointError, match="not part of the model") as refused:
        scratch_model(name).load_weights(weights.items())
    assert unknown in str(refused.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qk_norm", "model.transformer.wte.weight"),
        ("qk_norm", "model.transformer.ln_f.weight"),
        ("qk_norm", f"{BLOCK}.q_proj.weight"),
        ("qk_norm", f"{BLOCK}.up_proj.weight"),
        ("qk_norm", f"{BLOCK}.ff_out.weight"),
        ("qk_norm", f"{BLOCK}.k_norm.weight"),
        ("dream", "model.layers.0.self_attn.v_proj.bias"),
        ("dream", "model.layers.0.mlp.down_proj.weight"),
        ("moe_bias", "model.layers.0.mlp.expert_bias"),
        ("moe", "model.layers.0.mlp.gate.weight"),
        ("moe", f"{EXPERTS}.3.gate_proj.weight"),
        ("moe", f"{EXPERTS}.3.down_proj.weight"),
        ("moe_fused", "model.layers.1.mlp.w1"),
        ("moe_fused", "model.layers.1.mlp.w2"),
    ],
)
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_shapes_are_named(
    name: str, tensor: str, change: int, scratch_model: Callable[[str], DiffusionModel]
) -> None:
    weights = weights_of(name)
    shape = list(weights[tensor].shape)
    shape[0] += change
    weights[tensor] = torch.zeros(shape)
    with pytest.raises(CheckpointError, match="shape") as refused:
        scratch_model(name).load_weights(weights.items())
    assert tensor in str(refused.value)


@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [
        ("tied", "model.transformer.wte.weight", f"{HEAD}.weight"),
        ("dream_tied", "model.embed_tokens.weight", "lm_head.weight"),
    ],
)
def test_a_tied_model_skips_a_head_that_is_there(
    name: str, embedding: str, head: str, scratch_model: Callable[[str], DiffusionModel]
) -> None:
    model, weights = scratch_model(name), weights_of(name)
    weights[head] = torch.full_like(weights[embedding], 7.0)
    model.load_weights(weights.items())
    assert torch.equal(model.get_submodule("lm_head").weight, weights[embedding])

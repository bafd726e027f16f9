# SPDX-License-Identifier: Apache-2.0
"""config.json of LLaDA: names, defaults and refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.models.released import make_config as make_any
from vllm.diffusion.core.errors import ModelConfigError
from vllm.diffusion.models.config import config_classes
from vllm.diffusion.request.families import FAMILIES, LLADA

make = partial(make_any, "llada")


def test_released_config_under_both_names() -> None:
    config = make()
    assert (config.d_model, config.hidden_size) == (4096, 4096)
    assert (config.n_heads, config.num_attention_heads) == (32, 32)
    assert (config.n_kv_heads, config.num_key_value_heads) == (32, 32)
    assert (config.n_layers, config.num_hidden_layers) == (32, 32)
    assert (config.mlp_hidden_size, config.intermediate_size) == (12288, 12288)
    assert (config.max_sequence_length, config.max_position_embeddings) == (4096, 4096)
    assert (config.weight_tying, config.tie_word_embeddings) == (False, False)
    assert config.hidden_act == "silu"
    assert config.head_dim == 128
    assert config.dtype == torch.bfloat16
    assert (config.eos_token_id, config.mask_token_id) == (126081, 126336)


def test_hugging_face_names_alone() -> None:
    config = make(
        *("d_model", "n_heads", "n_kv_heads", "n_layers", "mlp_hidden_size"),
        *("max_sequence_length", "weight_tying", "activation_type"),
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        intermediate_size=96,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        hidden_act="silu",
    )
    assert (config.d_model, config.n_heads, config.n_kv_heads, config.n_layers) == (64, 4, 2, 3)
    assert (config.mlp_hidden_size, config.max_sequence_length) == (96, 512)
    assert config.weight_tying is True


def test_llada_names_come_first() -> None:
    assert make(hidden_size=1, num_hidden_layers=1).d_model == 4096


def test_nulls_follow_other_keys() -> None:
    config = make(n_kv_heads=None, mlp_hidden_size=None, mlp_ratio=3, embedding_size=None)
    assert config.n_kv_heads == 32
    assert config.mlp_hidden_size == 3 * 4096
    assert config.embedding_size == 126464
    assert make(n_kv_heads=None, multi_query_attention=True).n_kv_heads == 1
    assert make(n_kv_heads=None, multi_query_attention=False).n_kv_heads == 32


def test_absent_keys_take_the_public_defaults() -> None:
    config = make("rope_theta", "rms_norm_eps", "scale_logits", "include_bias")
    assert config.rope_theta == 10000.0
    assert config.rms_norm_eps == 1e-5
    assert config.scale_logits is False
    assert config.include_bias is False


@pytest.mark.parametrize(
    "key", ["rope", "block_type", "layer_norm_type", "weight_tying", "activation_type"]
)
def test_keys_without_a_safe_default_are_required(key: str) -> None:
    with pytest.raises(ModelConfigError, match=key) as refused:
        make(key)
    assert (refused.value.key, refused.value.given) == (key, None)


@pytest.mark.parametrize("architecture", ["SomethingElseLM", "LlamaForCausalLM"])
def test_unknown_architectures_are_refused(architecture: str) -> None:
    with pytest.raises(ModelConfigError, match="LLaDAModelLM") as refused:
        make(architectures=[architecture])
    assert refused.value.key == "architectures"


def test_every_registered_architecture_has_a_configuration_class() -> None:
    for family in FAMILIES:
        for model_type in family.model_types:
            assert config_classes()[model_type].model_type == model_type
    for architecture in LLADA.architectures:
        assert make(architectures=[architecture]).architectures == [architecture]

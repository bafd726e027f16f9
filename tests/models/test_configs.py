# SPDX-License-Identifier: Apache-2.0
"""config.json of the families: dispatch, names, defaults and refusals."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from vllm.model_executor.models import ModelRegistry
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from tests.models.released import RELEASED, make_config
from tests.models.released import make_config as make_any
from vllm.diffusion.core.errors import ModelConfigError
from vllm.diffusion.models.config import DiffusionConfig, config_classes
from vllm.diffusion.models.dream import DreamConfig
from vllm.diffusion.models.llada2 import LLaDA2Config
from vllm.diffusion.models.llada_moe import LLaDAMoEConfig
from vllm.diffusion.plugin import register
from vllm.diffusion.request.families import (
    ARCHITECTURES,
    DREAM,
    FAMILIES,
    IDLM,
    LLADA,
    LLADA2,
    LLADA21,
    LLADA22,
    LLADA_MOE,
    SDAR,
    Family,
    family_of,
    why_not_served,
)

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


# ---- config.json of the families: dispatch, defaults and refusals ----


DREAM_7B, MOE_7B, LLADA2_MINI = (RELEASED[name][1] for name in ("dream", "moe", "llada2"))


@pytest.mark.parametrize(
    ("family", "num_experts", "heads", "vocab_size", "length"),
    [
        ("llada", 0, (32, 32), 126464, 4096),
        ("dream", 0, (28, 4), 152064, 131072),
        ("moe", 64, (16, 16), 157184, 8192),
        ("sdar", 0, (32, 8), 151936, 32768),
        ("fast_dllm", 0, (28, 4), 152064, 32768),
        ("idlm", 0, (32, 8), 151936, 40960),
        ("sdar_moe", 128, (32, 4), 151936, 32768),
        ("llada2", 256, (16, 4), 157184, 32768),
        ("nemotron", 0, (32, 8), 131072, 262144),
    ],
)
def test_upstream_reads_the_shapes_it_wants(
    family: str, num_experts: int, heads: tuple[int, int], vocab_size: int, length: int
) -> None:
    config = make_config(family)
    shape = ModelArchConfigConvertorBase(config, config.get_text_config()).convert()
    assert shape.head_size == config.head_dim == 128
    assert (shape.total_num_attention_heads, shape.total_num_kv_heads) == heads
    assert (shape.vocab_size, shape.num_experts) == (vocab_size, num_experts)
    assert shape.derived_max_model_len_and_key[0] == length
    assert not hasattr(config, "canvas_length")  # belongs to upstream's own diffusion models


def test_dream_class_defaults() -> None:
    config = DreamConfig()
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (
        151936,
        4096,
        22016,
    )
    assert (config.num_hidden_layers, config.num_attention_heads) == (32, 32)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (32, 32768)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-6, 10000.0)
    assert config.tie_word_embeddings is False
    assert config.pad_token_id == 151643
    assert make_config("dream", num_key_value_heads=None).num_key_value_heads == 28


def test_moe_options_default_to_those_of_the_release() -> None:
    config = make_config(
        "moe",
        *("rms_norm_eps", "partial_rotary_factor", "clip_qkv", "attention_bias", "qk_layernorm"),
        *("moe_router_score_function", "moe_router_enable_expert_bias", "tie_word_embeddings"),
        *("mask_token_id", "eos_token_id", "pad_token_id", "moe_layer_freq", "num_key_value_heads"),
        "dense_intermediate_size",
    )
    assert (config.rms_norm_eps, config.architecture.rotary_dim, config.clip_qkv) == (
        1e-5,
        128,
        None,
    )
    assert config.qk_layernorm is True
    assert config.moe_router_enable_expert_bias is False
    assert config.tie_word_embeddings is False
    assert config.eos_token_id == 156892
    assert config.num_key_value_heads == 16
    assert config.architecture.expert_layers == tuple(range(16))


@pytest.mark.parametrize(
    ("freq", "dense"),
    [
        (1, []),
        (0, list(range(16))),
        (2, list(range(1, 16, 2))),
        (16, list(range(1, 16))),
        ([1] * 16, []),
        ([0, *[1] * 15], [0]),
    ],
)
def test_which_layers_have_experts(freq: int | list[int], dense: list[int]) -> None:
    config = make_config("moe", moe_layer_freq=freq)
    assert sorted({*range(16)} - {*config.architecture.expert_layers}) == dense


def test_partial_rotary() -> None:
    assert make_config("moe", partial_rotary_factor=0.25).architecture.rotary_dim == 32


PLAIN_ROPE = sorted({*RELEASED} - {"nemotron"})


@pytest.mark.parametrize("family", PLAIN_ROPE)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_plain_rope_description_gives_the_base(family: str, key: str) -> None:
    described = {"rope_type": "default", "rope_theta": 12345.0}
    for actual in (
        described,
        {**described, "type": "default", "factor": None},
        {"rope_theta": 12345.0},  # plain without a type, as in transformers
        {"full_attention": described},
        {"full_attention": described, "sliding_attention": {"rope_type": "linear"}},
        {"full_attention": {"rope_type": "default"}, "rope_theta": 12345.0},
    ):
        config = make_config(family, "rope_theta", "rope_scaling", **{key: actual})
        assert config.rope_theta == 12345.0
        assert make_config(family, rope_theta=12345.0, **{key: actual}).rope_theta == 12345.0
    for actual in ({"type": "default"}, {}, None):
        assert make_config(family, **{key: actual}).rope_theta == make_config(family).rope_theta


@pytest.mark.parametrize("family", PLAIN_ROPE)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "described",
    [
        *({"rope_type": kind, "factor": 4.0} for kind in ("linear", "dynamic", "yarn", "llama3")),
        {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
        {"type": "su", "short_factor": [1.0]},
        {"rope_type": "default", "type": "linear"},
        {"rope_type": "default", "mrope_section": [16, 24, 24]},
        {"rope_theta": 12345.0, "factor": 4.0},
        {"full_attention": {"rope_type": "yarn", "factor": 4.0}},
        {"full_attention": {"rope_theta": 2.0}, "rope_theta": 3.0},
        {"sliding_attention": {"rope_theta": 12345.0}},
        "yarn",
        [],
    ],
    ids=str,
)
def test_any_other_rope_is_refused(family: str, key: str, described: Any) -> None:
    with pytest.raises(ModelConfigError) as refused:
        make_config(family, "rope_theta", "rope_scaling", **{key: described})
    assert (refused.value.key, refused.value.given) == (key, described)


@pytest.mark.parametrize("family", PLAIN_ROPE)
def test_keys_that_disagree_on_the_rope_are_refused(family: str) -> None:
    theta, given = "rope_theta", make_config(family).rope_theta
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelConfigError, match=key) as refused:
            make_config(family, **{key: {"rope_type": "default", theta: 2 * given}})
        assert (refused.value.key, refused.value.given) == (theta, given)
    with pytest.raises(ModelConfigError, match="rope_parameters"):
        make_config(family, theta, rope_scaling={theta: 2.0}, rope_parameters={theta: 3.0})


@pytest.mark.parametrize("family", PLAIN_ROPE)
def test_the_share_of_rotated_channels_may_stand_in_a_description(family: str) -> None:
    key, share = "partial_rotary_factor", 0.25
    described = {"rope_theta": 12345.0, key: share}
    if family not in ("moe", "llada2", "llada22"):
        for others in ({"rope_parameters": described}, {key: share, "rope_theta": 12345.0}):
            with pytest.raises(ModelConfigError, match="only 1 is supported") as refused:
                make_config(family, "rope_theta", "rope_scaling", **others)
            assert (refused.value.key, refused.value.given) == (key, share)
        return
    left_out = ("rope_theta", "rope_scaling", key)
    config = make_config(family, *left_out, rope_parameters=described)
    assert config.architecture.rotary_dim == config.head_dim // 4
    with pytest.raises(ModelConfigError, match="rope_parameters") as refused:
        make_config(family, *left_out, rope_parameters=described, **{key: 0.5})
    assert (refused.value.key, refused.value.given) == (key, 0.5)
    with_dim = make_config(family, *left_out, rope_parameters=described, rotary_dim=64)
    assert with_dim.architecture == config.architecture  # published forward passes agree


def test_descriptions_of_yarn_for_each_type_of_layer() -> None:
    described = make_config("nemotron").rope_parameters
    nested = {"full_attention": described}
    assert make_config("nemotron", rope_parameters=nested).architecture.yarn[0] == 16.0
    for key, value in (("rope_scaling", {**described, "factor": 8.0}), ("dlm_type", "dream")):
        with pytest.raises(ModelConfigError) as refused:
            make_config("nemotron", **{key: value})
        assert (refused.value.key, refused.value.given) == (key, value)
    with pytest.raises(ModelConfigError, match="mrope_section"):
        make_config("nemotron", rope_parameters={**described, "mrope_section": [1]})


# Keys that change the forward pass of another model, with a value that does.
FOREIGN: list[tuple[str, Any]] = [
    *((key, True) for key in ("alibi", "use_sliding_window", "norm_after", "rope_interleave")),
    *((key, True) for key in ("scale_embedding", "apply_layernorm_1p", "is_encoder_decoder")),
    *((key, 2.0) for key in ("logit_scale", "embedding_multiplier", "residual_multiplier")),
    *((key, 30.0) for key in ("final_logit_softcapping", "attn_logit_softcapping")),
    *((key, "gelu") for key in ("hidden_act", "hidden_activation", "activation_type")),
    *(("layer_types", ["sliding_attention"]), ("per_layer_config", {"0": {"num_experts": 1}})),
    *(("rotary_pct", 0.5), ("attention_chunk_size", 8192)),
    *(("position_embedding_type", "absolute"), ("n_routed_experts", 64), ("mlp_bias", True)),
    ("query_pre_attn_scalar", 256),
]


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        *((family, *foreign) for foreign in FOREIGN for family in sorted(RELEASED)),
        *((family, "attention_bias", False) for family in ("dream", "fast_dllm")),
        *((family, "weight_tying", True) for family in ("dream", "sdar", "moe", "nemotron")),
        ("llada", "tie_word_embeddings", True),
        ("llada", "hidden_act", "gelu"),
        ("llada", "num_attention_heads", 16),
        ("llada", "num_key_value_heads", 8),
        ("llada", "sliding_window", 4096),
        ("sdar_moe", "num_local_experts", 64),
        ("sdar_moe", "scoring_func", "sigmoid"),
        ("sdar_moe", "shared_expert_intermediate_size", 768),
        ("llada2", "scoring_func", "softmax"),
        ("moe", "n_group", 8),
        ("moe", "routed_scaling_factor", 2.5),
        ("sdar", "clip_qkv", 8.0),
        ("sdar", "rotary_dim", 64),
        ("llada", "rotary_dim", 64),
        ("sdar", "expert_capacity", 4),
    ],
)
def test_keys_that_contradict_the_forward_are_refused(family: str, key: str, value: Any) -> None:
    with pytest.raises(ModelConfigError) as refused:
        make_config(family, **{key: value})
    assert (refused.value.key, refused.value.given) == (key, value)


def test_the_number_of_experts_has_another_name_in_transformers_5() -> None:
    config = make_config("sdar_moe", "num_experts", num_local_experts=64)
    assert config.num_experts == 64


@pytest.mark.parametrize("family", sorted(RELEASED))
def test_keys_that_nobody_knows_are_named(family: str) -> None:
    assert make_config(family).unknown_keys == ()
    actual = make_config(family, new_kind_of_norm=True, _comment="", id2label={"0": "a"})
    assert actual.unknown_keys == ("new_kind_of_norm",)
    assert pickle.loads(pickle.dumps(actual)).unknown_keys == actual.unknown_keys


@pytest.mark.parametrize("family", sorted(RELEASED))
def test_special_tokens_have_no_defaults_that_count(family: str) -> None:
    """The default id of the public class belongs to one vocabulary, and not to every checkpoint."""
    ids = ("mask_token_id", "eos_token_id")
    config = make_config(family, *ids)
    assert not {*ids} & vars(config).keys()
    assert getattr(config, "mask_token_id", None) is None
    assert make_config(family, *ids, mask_token_id=None).to_dict().get("mask_token_id") is None


@pytest.mark.parametrize("family", sorted(RELEASED))
def test_copies_and_round_trips(family: str) -> None:
    config = make_config(family)
    assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()
    assert copy.deepcopy(config).to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("family", "key", "value", "others"),
    [
        ("llada", "block_type", "sequential", {}),
        ("llada", "activation_type", "swiglu", {}),
        ("llada", "layer_norm_type", "default", {}),
        ("llada", "layer_norm_with_affine", False, {}),
        ("llada", "attention_layer_norm_with_affine", False, {"attention_layer_norm": True}),
        ("llada", "rope", False, {}),
        ("llada", "alibi", True, {}),
        ("llada", "rope_scaling", {"rope_type": "linear", "factor": 2.0}, {}),
        ("llada", "clip_qkv", 8.0, {}),
        ("llada", "bias_for_layer_norm", True, {}),
        ("llada", "bias_for_layer_norm", None, {"include_bias": True}),  # null means include_bias
        ("llada", "n_kv_heads", 8, {"multi_query_attention": True}),
        ("llada", "n_kv_heads", 8, {"multi_query_attention": False}),
        ("llada", "n_kv_heads", 5, {}),
        ("llada", "n_heads", 33, {}),
        ("llada", "n_heads", 4096, {}),  # heads of one channel cannot be rotated
        ("llada", "block_group_size", 5, {}),
        ("llada", "embedding_size", 126463, {}),
        ("llada", "mask_token_id", 126464, {}),
        ("llada", "d_model", "4096", {}),
        ("llada", "n_layers", 0, {}),
        ("llada", "n_layers", True, {}),
        ("llada", "max_sequence_length", -1, {}),
        ("llada", "mlp_hidden_size", 1.5, {}),
        ("llada", "rope_theta", 0, {}),
        ("llada", "rms_norm_eps", "1e-5", {}),
        ("dream", "hidden_act", "gelu", {}),
        ("dream", "use_sliding_window", True, {"sliding_window": 4096}),
        ("dream", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, {}),
        ("dream", "rope_scaling", {"type": "linear", "factor": 2.0}, {}),
        ("dream", "rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e6}, {}),
        ("dream", "num_key_value_heads", 3, {}),
        ("dream", "num_attention_heads", 33, {}),
        ("dream", "head_dim", 63, {}),
        ("dream", "head_dim", "64", {}),
        ("dream", "mask_token_id", 152064, {}),
        ("dream", "hidden_size", "3584", {}),
        ("dream", "num_hidden_layers", 0, {}),
        ("dream", "intermediate_size", None, {}),
        ("dream", "rope_theta", 0, {}),
        ("fast_dllm", "use_sliding_window", True, {"sliding_window": 4096}),
        ("fast_dllm", "layer_types", ["sliding_attention"] * 28, {}),
        ("fast_dllm", "bd_size", "32", {}),
        ("fast_dllm", "hidden_act", "gelu", {}),
        ("sdar_moe", "attention_bias", True, {}),
        ("sdar_moe", "num_experts_per_tok", 129, {}),
        ("sdar_moe", "moe_intermediate_size", None, {}),
        ("sdar_moe", "decoder_sparse_step", 0, {}),
        ("sdar_moe", "mlp_only_layers", [48], {}),
        ("sdar_moe", "norm_topk_prob", "yes", {}),
        ("sdar_moe", "quantization_config", {"quant_method": "mxfp4"}, {}),
        ("llada2", "use_bias", True, {}),
        ("llada2", "use_qkv_bias", True, {}),
        ("llada2", "use_qk_norm", False, {}),
        ("llada2", "norm_head", True, {}),
        ("llada2", "score_function", "softmax", {}),
        ("llada2", "norm_topk_prob", False, {}),
        ("llada2", "moe_router_enable_expert_bias", False, {}),
        ("llada2", "router_dtype", "bf16", {}),
        ("llada2", "hidden_act", "gelu", {}),
        ("llada2", "use_sliding_window", True, {}),
        ("llada22", "expert_capacity", 7, {}),
        ("llada22", "expert_capacity", 257, {}),
        ("llada22", "expert_capacity", 48.5, {}),
        ("llada22", "delete_token_id", None, {}),
        ("llada22", "split_token_id", 157184, {}),
        ("llada22", "block_size", 0, {}),
        ("llada2", "quantization_config", {"quant_method": "mxfp4"}, {}),
        ("llada2", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, {}),
        ("llada2", "partial_rotary_factor", 0.3, {"head_dim": 10}),
        ("llada2", "num_experts_per_tok", 257, {}),
        ("llada2", "n_group", 7, {}),
        ("llada2", "n_group", 256, {}),
        ("llada2", "topk_group", 9, {}),
        ("llada2", "topk_group", 1, {"num_experts_per_tok": 33}),
        ("llada2", "first_k_dense_replace", -1, {}),
        ("llada2", "num_shared_experts", 0.5, {}),
        ("llada2", "routed_scaling_factor", 0, {}),
        ("llada2", "block_size", 0, {}),
        ("nemotron", "dlm_paradigm", "causal", {}),
        ("nemotron", "sliding_window", 4096, {}),
        ("nemotron", "attention_bias", True, {}),
        ("nemotron", "rope_parameters", {"rope_type": "linear", "rope_theta": 1e6}, {}),
        ("nemotron", "mask_token_id", 131072, {}),
        ("sdar", "attention_bias", True, {}),
        ("sdar", "use_sliding_window", True, {"sliding_window": 4096}),
        ("sdar", "layer_types", ["full_attention", "sliding_attention"], {}),
        ("sdar", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, {}),
        ("sdar", "block_size", 0, {}),
        ("sdar", "mask_token_id", 151936, {}),
        ("sdar", "max_position_embeddings", None, {}),
        ("moe", "hidden_act", "gelu", {}),
        ("moe", "attention_bias", True, {}),
        ("moe", "moe_router_score_function", "sigmoid", {}),
        ("moe", "shared_expert_intermediate_size", 1024, {}),
        ("moe", "num_shared_experts", 1, {}),
        ("moe", "use_sliding_window", True, {}),
        ("moe", "quantization_config", {"quant_method": "mxfp4"}, {}),
        ("moe", "rope_scaling", {"rope_type": "linear", "factor": 2.0}, {}),
        ("moe", "rope_theta", None, {}),
        ("moe", "num_experts_per_tok", 65, {}),
        ("moe", "num_experts", None, {}),
        ("moe", "expert_intermediate_size", -1, {}),
        ("moe", "dense_intermediate_size", None, {"moe_layer_freq": 2}),
        ("moe", "moe_layer_freq", [1] * 15, {}),
        ("moe", "moe_layer_freq", [2] * 16, {}),
        ("moe", "moe_layer_freq", -1, {}),
        ("moe", "moe_layer_freq", "all", {}),
        ("moe", "clip_qkv", 0, {}),
        ("moe", "partial_rotary_factor", 1.5, {}),
        ("moe", "partial_rotary_factor", 0.01, {}),
        ("moe", "num_key_value_heads", 3, {}),
        ("moe", "mask_token_id", 157184, {}),
    ],
)
def test_refusals_name_key_given_and_wanted(
    family: str, key: str, value: Any, others: dict[str, Any]
) -> None:
    with pytest.raises(ModelConfigError) as refused:
        make_config(family, **{key: value, **others})
    assert refused.value.key == key
    assert refused.value.given == value
    assert refused.value.wanted
    assert key in str(refused.value)


def test_a_sliding_window_that_is_not_in_use_is_dropped() -> None:
    assert make_config("dream", sliding_window=4096).sliding_window is None


@pytest.mark.parametrize("parameters", sorted(config_classes()))
@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        *((values, kind) for kind, values in RELEASED.values()),
        ({**DREAM_7B, "architectures": ["DreamForDiffusionLM"]}, DreamConfig),
        ({**MOE_7B, "model_type": "llada"}, LLaDAMoEConfig),
        ({**MOE_7B, "model_type": "dllm"}, LLaDAMoEConfig),
        ({**LLADA2_MINI, "model_type": "llada21_moe"}, LLaDA2Config),
    ],
)
def test_the_architecture_decides(
    parameters: str, values: dict[str, Any], wanted: type[DiffusionConfig]
) -> None:
    assert type(config_classes()[parameters].from_dict(dict(values))) is wanted


def test_without_an_architecture_the_model_type_decides() -> None:
    values = {key: value for key, value in MOE_7B.items() if key != "architectures"}
    config = config_classes()["dllm"].from_dict(values)
    assert isinstance(config, LLaDAMoEConfig) and type(config).model_type == "dllm"


def test_block_lengths() -> None:
    assert make_config("sdar").block_length == 4
    assert (
        make_config("sdar", "block_size").block_length
        == make_config("sdar", block_size=None).block_length
    )
    assert make_config("sdar", "block_size").block_length == 32
    assert make_config("fast_dllm", bd_size=16).block_length == 16


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("llada2_moe", LLADA2), ("llada21_moe", LLADA21), ("llada2_moe_copy", LLADA2)],
)
def test_the_model_type_tells_versions_apart(model_type: str, family: Family) -> None:
    config = make_config("llada2", model_type=model_type)
    assert config.family is family
    assert pickle.loads(pickle.dumps(config)).family is family


@pytest.mark.parametrize("model_type", ["llada2_moe", "llada21_moe"])
def test_a_capacity_tells_llada22_apart(model_type: str) -> None:
    config = make_config("llada22", model_type=model_type, n_group=7, topk_group=0)
    assert config.family is LLADA22
    assert pickle.loads(pickle.dumps(config)).family is LLADA22
    assert config_classes()["llada2_moe"].from_dict(config.to_dict()).family is LLADA22
    scoring = config.architecture.scoring
    assert (scoring.window, scoring.capacity, scoring.num_groups) == (32, 48, 1)
    assert config.block_length == 32
    assert config.rope_theta == 3000000
    for absent in (None, 0):
        assert make_config("llada2", expert_capacity=absent).family is LLADA2


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("factor", 0),
        ("rope_theta", None),
        ("beta_fast", "32"),
        ("mscale", 0.7),
        ("mscale", None),
        ("attention_factor", 1.2),
        ("truncate", False),
        ("llama_4_scaling_beta", -1),
    ],
)
def test_a_description_of_yarn_is_whole(key: str, value: Any) -> None:
    described = make_config("nemotron").rope_parameters | {key: value}
    with pytest.raises(ModelConfigError, match=key):
        make_config("nemotron", rope_parameters=described)


def test_the_base_of_yarn_stands_in_its_description() -> None:
    config = make_config("nemotron", rope_theta=5.0)
    assert config.rope_theta == 1e9
    assert config.architecture.yarn == (16.0, 16384, 32.0, 1.0)
    assert config.architecture.growth_within(8192) is None  # masks at most double the length
    assert config.architecture.growth_within(8193) == (0.1, 16384)
    assert pickle.loads(pickle.dumps(config)).architecture == config.architecture


def test_a_script_tells_which_one_serves_a_checkpoint() -> None:
    actual = ["LLaDA2MoeModelLM"], "llada2_moe"
    assert why_not_served("llada2", *actual) is None
    assert why_not_served("llada22", *actual, {"expert_capacity": 48}) is None
    for name, other, capacity in (("llada2", "llada22", 48), ("llada22", "llada2", 0)):
        reason = why_not_served(name, *actual, {"expert_capacity": capacity})
        assert reason is not None
        assert "LLaDA2MoeModelLM with expert_capacity" in reason
        assert f"run_{other}_server.sh serves this one" in reason


@pytest.mark.parametrize(
    ("overrides", "experts"),
    [
        ({"first_k_dense_replace": 0}, range(20)),
        ({"first_k_dense_replace": 3}, range(3, 20)),
        ({"first_k_dense_replace": 25}, range(0)),
    ],
)
def test_first_layers_of_llada2_are_dense(overrides: dict[str, Any], experts: range) -> None:
    architecture = make_config("llada2", **overrides).architecture
    assert architecture.expert_layers == tuple(experts)
    assert architecture.dense_width == (5120 if len(experts) < 20 else 0)


@pytest.mark.parametrize(
    ("overrides", "dense"),
    [
        ({}, []),
        ({"mlp_only_layers": [0, 47]}, [0, 47]),
        ({"decoder_sparse_step": 2}, list(range(0, 48, 2))),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 1, *range(2, 48, 2)]),
    ],
)
def test_which_layers_of_sdar_moe_are_dense(overrides: dict[str, Any], dense: list[int]) -> None:
    architecture = make_config("sdar_moe", **overrides).architecture
    assert sorted({*range(48)} - {*architecture.expert_layers}) == dense
    assert architecture.dense_width == (6144 if dense else 0)


def test_options_of_llada2_default_to_those_of_the_release() -> None:
    options = (
        *("rms_norm_eps", "partial_rotary_factor", "use_bias", "use_qkv_bias", "use_qk_norm"),
        *("norm_head", "score_function", "norm_topk_prob", "moe_router_enable_expert_bias"),
        *("router_dtype", "n_group", "topk_group", "routed_scaling_factor", "num_shared_experts"),
        "first_k_dense_replace",
    )
    assert make_config("llada2", *options).architecture == make_config("llada2").architecture
    assert (
        make_config("llada2", **dict.fromkeys(options)).architecture
        == make_config("llada2").architecture
    )
    assert make_config("llada2").architecture.rotary_dim == 64
    assert make_config("llada2").architecture.shared_expert_width == 512
    assert make_config("llada2").block_length == 32


def test_a_mask_token_may_be_the_tokenizers() -> None:
    assert make_config("sdar", "mask_token_id").family is SDAR
    assert make_config("idlm", "mask_token_id").family is IDLM


def test_architectures_of_the_families() -> None:
    for name in ("DreamModel", "DreamForDiffusionLM"):
        assert family_of([name], "Dream") is DREAM
    assert family_of(["LLaDAMoEModelLM"], "llada") is LLADA_MOE
    assert family_of(["LLaDAModelLM"], "llada") is LLADA
    assert family_of(["SomethingElseLM", "SDARForCausalLM"], None) is SDAR
    assert family_of(["SomethingElseLM"], "sdar") is None
    assert family_of(None, "sdar") is None
    assert family_of(["SDARForCausalLM"], "sdar", {"use_regular_causal": True}) is IDLM
    assert family_of(["SDARForCausalLM"], "sdar", {"use_regular_causal": False}) is SDAR
    assert (DREAM.logit_shift, LLADA_MOE.logit_shift) == (1, 0)


# ---- properties of our model classes that upstream reads ----


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_upstream_sees_a_text_generation_model(architecture: str) -> None:
    register()
    info = ModelRegistry.models[architecture].inspect_model_cls()
    assert info.is_text_generation_model
    assert not info.is_pooling_model
    assert not info.supports_multimodal
    assert not info.supports_pp
    assert not info.has_inner_state

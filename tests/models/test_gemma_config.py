# SPDX-License-Identifier: Apache-2.0
"""config.json of DiffusionGemma, and how the family is registered with upstream."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.model_executor.models import config as upstream_config
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from tests.checkpoint_files import change_json, change_weights
from tests.gemma import make_gemma
from tests.models.support import engine_config
from vllm.diffusion.config import served_model
from vllm.diffusion.core.errors import CheckpointError, ModelConfigError, ServerConfigError
from vllm.diffusion.models.diffusion_gemma import DiffusionGemmaConfig, Heads
from vllm.diffusion.plugin import register

# The released text part.
TEXT: dict[str, Any] = {
    "model_type": "diffusion_gemma_text",
    "vocab_size": 262144,
    "hidden_size": 2816,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "sliding_window": 1024,
    "intermediate_size": 2112,
    "moe_intermediate_size": 704,
    "num_experts": 128,
    "top_k_experts": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262144,
    "use_bidirectional_attention": "vision",
    "attention_k_eq_v": True,
    "tie_word_embeddings": True,
}
RELEASED: dict[str, Any] = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "model_type": "diffusion_gemma",
    "canvas_length": 256,
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "image_token_id": 258880,
    "vision_config": {"model_type": "gemma4_vision"},
    "tie_word_embeddings": True,
}


def make(*without: str, **text: Any) -> DiffusionGemmaConfig:
    """Return the configuration with changed keys of `text_config`."""
    values = {key: value for key, value in TEXT.items() if key not in without}
    released = {**RELEASED, "text_config": {**values, **text}}
    config = DiffusionGemmaConfig.from_dict(copy.deepcopy(released))
    assert isinstance(config, DiffusionGemmaConfig)
    return config


def test_released_config() -> None:
    config = make()
    assert config.model_type == "diffusion_gemma"
    assert (config.block_length, config.vocab_size) == (256, 262144)
    assert config.heads(4) == Heads(8, 256, 1024)
    assert config.heads(5) == Heads(2, 512, 0)
    assert config.cache_heads == (4, 512)
    assert config.unknown_keys == ()
    assert not hasattr(config, "canvas_length")
    shape = ModelArchConfigConvertorBase(config, config.get_text_config()).convert()
    assert (shape.vocab_size, shape.num_experts) == (262144, 128)
    assert shape.derived_max_model_len_and_key[0] == 262144


def test_both_forms_of_the_heads() -> None:
    """transformers writes the sizes of full layers by layer; releases have two keys."""
    entry = {"head_dim": 512, "num_key_value_heads": 2}
    names = ("global_head_dim", "num_global_key_value_heads")
    layers = {str(i): entry for i in range(5, 30, 6)}
    assert make(*names, per_layer_config=layers).to_dict() == make().to_dict()
    config = make(*names, per_layer_config={i: {"head_dim": 512} for i in range(5, 30, 6)})
    assert config.heads(5) == Heads(8, 512, 0)


def test_defaults() -> None:
    config = make("layer_types", "global_head_dim", "num_global_key_value_heads", "sliding_window")
    assert config.layer_types == TEXT["layer_types"]
    assert config.heads(0).window == 512
    assert config.heads(29) == Heads(8, 512, 0)
    assert config.rope_parameters["full_attention"]["partial_rotary_factor"] == 0.25
    kinds = ["sliding_attention"] * 30
    assert make(layer_types=kinds).layer_types == [*kinds[:-1], "full_attention"]


def test_copies_and_round_trips() -> None:
    config = make()
    assert type(config).from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()
    assert make(new_kind_of_norm=True).unknown_keys == ("new_kind_of_norm",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_bidirectional_attention", "all"),
        ("hidden_activation", "silu"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("tie_word_embeddings", False),
        ("num_experts", None),
        ("top_k_experts", 129),
        ("moe_intermediate_size", 0),
        ("num_key_value_heads", 5),
        ("num_global_key_value_heads", 3),
        ("global_head_dim", 511),
        ("sliding_window", 0),
        ("final_logit_softcapping", 0),
        ("layer_types", ["sliding_attention"] * 29),
        ("layer_types", ["chunked_attention"] * 30),
        ("per_layer_config", {"5": {"head_dim": 512}}),
        ("per_layer_config", {str(i): {"head_dim": 500 + i} for i in range(5, 30, 6)}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("rope_parameters", {"full_attention": {"rope_type": "yarn", "factor": 4.0}}),
        ("rope_theta", -1),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_refusals_name_the_key(key: str, value: Any) -> None:
    text = {key: value}
    if key == "rope_theta":
        text = {"rope_parameters": {"sliding_attention": text}}
    with pytest.raises(ModelConfigError) as refused:
        make(**text)
    assert refused.value.key == key
    assert "\n" not in str(refused.value)


def test_only_this_architecture_is_taken_from_upstream() -> None:
    register()
    hooks = upstream_config.MODELS_CONFIG_MAP
    ours = hooks["DiffusionGemmaForBlockDiffusion"]
    assert ours is hooks["DreamModel"]
    assert ours not in [hook for name, hook in hooks.items() if name.startswith("Gemma")]


def test_upstream_sees_a_text_model(tmp_path: Path) -> None:
    config = engine_config(make_gemma(tmp_path))
    assert not config.model_config.is_diffusion
    assert not config.model_config.is_multimodal_model
    assert config.diffusion_config is None
    assert config.scheduler_config.max_num_seqs > 8


@pytest.mark.parametrize(("name", "value"), [("tensor_parallel_size", 2), ("quantization", "int4")])
def test_what_is_not_supported_is_refused_at_the_start(
    name: str, value: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"{name}: given {value}; wanted"):
        engine_config(make_gemma(tmp_path), **{name: value})


def test_another_sampler_is_refused(tmp_path: Path) -> None:
    folder = make_gemma(tmp_path, generation={"sampler_config": {"_cls_name": "OtherSampler"}})
    with pytest.raises(ServerConfigError, match="sampler_config: given 'OtherSampler'"):
        served_model(engine_config(folder))


def test_tensors_of_images_are_skipped_and_others_are_not(load_model: Any, tmp_path: Path) -> None:
    folder = make_gemma(tmp_path)
    change_weights(folder, lambda tensors: tensors.pop("model.decoder.norm.weight"))
    with pytest.raises(CheckpointError, match=r"model\.decoder\.norm\.weight"):
        load_model(folder)


def test_the_released_keys_load_too(load_model: Any, tmp_path: Path) -> None:
    folder = make_gemma(tmp_path)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    del text["per_layer_config"]
    keys = {"global_head_dim": 16, "num_global_key_value_heads": 1}
    change_json(folder, text_config={**text, **keys})
    assert load_model(folder).num_heads == 8

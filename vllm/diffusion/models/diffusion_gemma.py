# SPDX-License-Identifier: Apache-2.0
"""DiffusionGemma (Google DeepMind 2026), the text part of 26B-A4B.

Gemma 4's layers in two readings. Rows of the context are causal. Rows of the canvas, which has no
mask token, see the context and the whole canvas, and receive the expected embedding of the previous
step (self-conditioning). Most layers have a sliding window; the others have wider heads, fewer
key/value heads and no value projection.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from vllm.diffusion.core.pages import WindowLayers
from vllm.diffusion.models.config import Architecture, DiffusionConfig
from vllm.diffusion.models.config_checks import check_only, check_positive, refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

SLIDING, FULL = "sliding_attention", "full_attention"
_PATTERN = 6  # by default, every sixth layer is a full one
_ROPE: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_OF_ROPE = ("rope_type", "rope_theta", "partial_rotary_factor", "factor")


class Heads(NamedTuple):
    """Sizes of attention in one layer.

    Attributes:
        num_kv_heads, head_dim: number of key/value heads, and their width.
        window: number of keys that a row of the context reads, its own included; 0 for all.
    """

    num_kv_heads: int
    head_dim: int
    window: int


class DiffusionGemmaConfig(DiffusionConfig):
    """config.json of DiffusionGemma, with the keys of `text_config` at its top level.

    The canvas length is `block_size`. Upstream would take an attribute `canvas_length` as the sign
    of a model that its own diffusion loop serves. Keys of images are dropped.
    """

    model_type: ClassVar[str] = "diffusion_gemma"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "sliding_window": 512,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 131_072,
        "attention_bias": False,
        "use_bidirectional_attention": None,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "block_size": 256,
    }
    ONLY: ClassVar[dict[str, bool | str]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    SIZES: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim"),
        *("num_global_key_value_heads", "sliding_window", "num_experts", "top_k_experts"),
        *("moe_intermediate_size", "max_position_embeddings", "block_size"),
    )
    HARMLESS: ClassVar[tuple[str, ...]] = ("attention_k_eq_v", "num_experts_per_tok")
    IMAGES: ClassVar[tuple[str, ...]] = (
        *("vision_config", "boi_token_id", "eoi_token_id", "image_token_id"),
        *("audio_config", "video_token_id", "vision_soft_tokens_per_image"),
    )

    if TYPE_CHECKING:
        global_head_dim: int
        num_global_key_value_heads: int
        sliding_window: int
        top_k_experts: int
        moe_intermediate_size: int
        final_logit_softcapping: float
        rope_parameters: dict[str, dict[str, Any]]
        layer_types: list[str]

    def __init__(self, **values: Any) -> None:
        values = _flattened(values)
        complete = {**self.DEFAULTS, **{k: v for k, v in values.items() if v is not None}}
        check_only(complete, self.ONLY)
        if complete["use_bidirectional_attention"] not in (None, "vision"):
            refuse(complete, "use_bidirectional_attention", 'only null or "vision" is supported')
        if complete.get("attention_dropout"):
            refuse(complete, "attention_dropout", "only 0 is supported")
        if complete.get("quantization_config") is not None:
            refuse(complete, "quantization_config", "only null is supported by this family")
        complete["layer_types"] = _layer_types(complete)
        _read_layers(complete)
        if complete["num_global_key_value_heads"] is None:
            complete["num_global_key_value_heads"] = complete["num_key_value_heads"]
        for key in self.SIZES:
            check_positive(complete, key)
        for key in ("rms_norm_eps", "final_logit_softcapping"):
            check_positive(complete, key, whole=False)
        for key in ("num_key_value_heads", "num_global_key_value_heads"):
            if complete["num_attention_heads"] % complete[key]:
                wanted = f"a divisor of num_attention_heads {complete['num_attention_heads']}"
                refuse(complete, key, wanted)
        for key in ("head_dim", "global_head_dim"):
            if complete[key] % 2:
                refuse(complete, key, "an even number above 0")
        if complete["top_k_experts"] > complete["num_experts"]:
            refuse(complete, "top_k_experts", f"at most num_experts {complete['num_experts']}")
        complete["num_experts_per_tok"] = complete["top_k_experts"]
        complete["rope_parameters"] = _rope(complete)
        super().__init__(**complete)

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        return frozenset((*cls.DEFAULTS, *cls.HARMLESS, *cls.IMAGES))

    def validate_rope(self, *args: Any, **options: Any) -> None:
        """Do nothing: `_rope` checks rotary keys, and transformers' rules would reject them."""

    def heads(self, index: int) -> Heads:
        """Return the sizes of attention in a layer."""
        if self.layer_types[index] == FULL:
            return Heads(self.num_global_key_value_heads, self.global_head_dim, 0)
        return Heads(self.num_key_value_heads, self.head_dim, self.sliding_window)

    def of_layer(self, index: int) -> Self:
        """Return a copy with the key/value heads and the head width of a layer."""
        own = copy.copy(self)
        own.num_key_value_heads, own.head_dim, _ = self.heads(index)
        return own

    @property
    def cache_heads(self) -> tuple[int, int]:
        layers = [self.heads(index) for index in range(self.num_hidden_layers)]
        head_dim = max(heads.head_dim for heads in layers)
        widest = max(heads.num_kv_heads * heads.head_dim for heads in layers)
        return -(-widest // head_dim), head_dim

    def window_layers(self, num_ranks: int) -> WindowLayers | None:
        kinds = self.layer_types
        indices = tuple(index for index, kind in enumerate(kinds) if kind == SLIDING)
        if not indices:
            return None
        sliding, full = self.heads(indices[0]), self.heads(len(kinds) - 1)
        heads, other_heads = (
            (max(kind.num_kv_heads // num_ranks, 1), kind.head_dim) for kind in (sliding, full)
        )
        return WindowLayers(indices, sliding.window, heads, other_heads)

    @property
    def architecture(self) -> Architecture:
        num_layers = self.num_hidden_layers
        return Architecture(
            num_embeddings=self.vocab_size,
            # The tables of sliding layers and of full layers are side by side.
            rotary_dim=self.head_dim + self.global_head_dim,
            dense_width=0,
            layer_names=tuple(f"model.decoder.layers.{i}" for i in range(num_layers)),
            norms_each_head=True,
            expert_layers=tuple(range(num_layers)),
            expert_width=self.moe_intermediate_size,
            module_names={
                "model.embed_tokens": "model.decoder.embed_tokens",
                "model.norm": "model.decoder.norm",
            },
            # Plans count the dense MLP, whose result waits for the experts, as a shared expert.
            shared_expert_width=self.intermediate_size,
            has_equal_layers=False,
            norms_results=True,
            logits_cap=self.final_logit_softcapping,
        )


def _flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json and of its `text_config` side by side, without images."""
    flat = {key: value for key, value in values.items() if key != "text_config"}
    text = values.get("text_config") or {}
    if not isinstance(text, dict):
        text = text.to_dict()
    if text.get("tie_word_embeddings", True) is not True:
        refuse(text, "tie_word_embeddings", "only true is supported")
    flat = {**text, **{key: value for key, value in flat.items() if value is not None}}
    length = flat.pop("canvas_length", None)
    if length is not None:
        flat["block_size"] = length
    for key in DiffusionGemmaConfig.IMAGES:
        flat.pop(key, None)
    flat["model_type"] = DiffusionGemmaConfig.model_type
    return flat


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    """Return the kind of every layer; the last one is always a full layer."""
    check_positive(values, "num_hidden_layers")
    num_layers: int = values["num_hidden_layers"]
    default = [SLIDING if (i + 1) % _PATTERN else FULL for i in range(num_layers)]
    kinds = list(values.get("layer_types") or default)
    if len(kinds) != num_layers or not {*kinds} <= {SLIDING, FULL}:
        wanted = f'{num_layers} names, each "{SLIDING}" or "{FULL}"'
        refuse(values, "layer_types", wanted)
    return [*kinds[:-1], FULL]


def _read_layers(values: dict[str, Any]) -> None:
    """Replace `per_layer_config`, which transformers writes, by the keys of full layers."""
    key = "per_layer_config"
    layers = values.pop(key, None)
    if not layers:
        return
    given = {**values, key: layers}
    full = [i for i, kind in enumerate(values["layer_types"]) if kind == FULL]
    wanted = f"one entry, the same, for each full layer ({', '.join(map(str, full))})"
    if not isinstance(layers, dict) or sorted(map(str, layers)) != sorted(map(str, full)):
        refuse(given, key, wanted)
    entries = list(layers.values())
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    if any(entry != entries[0] or not {*entry} <= names.keys() for entry in entries):
        refuse(given, key, wanted)
    values |= {names[name]: value for name, value in entries[0].items()}


def _rope(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary embeddings of both kinds of layers."""
    key, ropes = "rope_parameters", {}
    described = values.get(key) or {}
    if not isinstance(described, dict) or not {*described} <= {*_ROPE}:
        refuse(values, key, f'descriptions of "{SLIDING}" and "{FULL}", or null')
    for kind, default in _ROPE.items():
        rope = {**default, **(described.get(kind) or {})}
        if rope["rope_type"] != default["rope_type"] or not {*rope} <= {*_OF_ROPE}:
            wanted = f'{kind} of rope_type "{default["rope_type"]}" with {", ".join(_OF_ROPE[1:])}'
            refuse(values, key, wanted)
        for name in ("rope_theta", "partial_rotary_factor", "factor"):
            if rope.get(name) is not None:
                check_positive(rope, name, whole=False)
        if rope.get("partial_rotary_factor", 1) > 1 or (
            kind == SLIDING and rope.get("partial_rotary_factor") not in (None, 1)
        ):
            refuse(rope, "partial_rotary_factor", "at most 1, and 1 in sliding layers")
        ropes[kind] = rope
    return ropes

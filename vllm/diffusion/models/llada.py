# SPDX-License-Identifier: Apache-2.0
"""LLaDA (Nie et al. 2025, arXiv:2502.09992), and checkpoints of its architecture.

A Llama-like transformer without a causal mask, with different names in config.json and in the
checkpoint. Logits at a position predict the token at that position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.core.errors import ModelConfigError
from vllm.diffusion.models.config import Architecture, DiffusionConfig
from vllm.diffusion.models.config_checks import (
    check_mask_id,
    check_only,
    check_positive,
    check_rotary_dim,
    head_width,
    refuse,
)
from vllm.diffusion.models.config_keys import check_foreign
from vllm.diffusion.models.rope_keys import read_rope

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


MODULE_NAMES = {
    "model.embed_tokens": "model.transformer.wte",
    "model.norm": "model.transformer.ln_f",
    "lm_head": "model.transformer.ff_out",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "self_attn.o_proj": "attn_out",
    "post_attention_layernorm": "ff_norm",
    "mlp.gate_proj": "ff_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "ff_out",
}


class LLaDAConfig(DiffusionConfig):
    """config.json of LLaDA.

    The names of the public LLaDA configuration are primary. A name of `attribute_map` (the usual
    Hugging Face names) is accepted if the LLaDA name is absent, and always works as an attribute.
    An absent key takes the default of the public configuration class, with two exceptions. The five
    keys of `REQUIRED` must be given, because their defaults describe another architecture
    (GPT-2's). Special tokens come from the tokenizer.

    After construction `embedding_size` (rows of the embedding and of the head), `n_kv_heads`,
    `mlp_hidden_size` and `head_dim` are integers: null has been resolved.
    """

    model_type: ClassVar[str] = "llada"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "num_hidden_layers": "n_layers",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
        "hidden_act": "activation_type",
        "tie_word_embeddings": "weight_tying",
    }

    REQUIRED: ClassVar[dict[str, str]] = {
        "rope": "true",
        "block_type": '"llama"',
        "layer_norm_type": '"rms"',
        "weight_tying": "true or false",
        "activation_type": '"silu"',
    }
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "d_model": 768,
        "n_heads": 12,
        "n_kv_heads": None,
        "n_layers": 12,
        "mlp_ratio": 4,
        "mlp_hidden_size": None,
        "alibi": False,
        "rope_full_precision": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_sequence_length": 1024,
        "multi_query_attention": None,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "layer_norm_with_affine": True,
        "bias_for_layer_norm": None,
        "block_group_size": 1,
        "include_bias": False,
        "include_qkv_bias": False,
        "input_emb_norm": False,
        "scale_logits": False,
        "vocab_size": 50257,
        "embedding_size": 50304,
    }
    # Aliases that must not contradict the primary name, because no tensor's shape would
    # reveal which of the two values is right.
    UNSEEN: ClassVar[tuple[str, ...]] = (
        *("num_attention_heads", "num_key_value_heads", "hidden_act", "tie_word_embeddings"),
    )

    if TYPE_CHECKING:
        d_model: int
        n_layers: int
        mlp_hidden_size: int
        rope_full_precision: bool
        attention_layer_norm: bool
        block_group_size: int
        include_bias: bool
        include_qkv_bias: bool
        input_emb_norm: bool
        scale_logits: bool
        embedding_size: int

    def __init__(self, **values: Any) -> None:
        read_rope(values)
        primary = _primary_names(values, self.attribute_map, self.UNSEEN)
        for key, wanted in self.REQUIRED.items():
            if primary.get(key) is None:
                raise ModelConfigError(key, None, f"it must be given explicitly: {wanted}")
        if primary.get("rope_theta") is None:
            primary.pop("rope_theta", None)  # null means the default
        complete = _resolve_nulls({**self.DEFAULTS, **primary})
        _check_supported(complete)
        check_foreign(complete, self.known_keys())
        _check_shapes(complete)
        complete["head_dim"] = head_width(complete, "d_model", "n_heads", "n_kv_heads")
        check_rotary_dim(complete)
        super().__init__(**complete)

    @classmethod
    def known_keys(cls) -> frozenset[str]:
        return frozenset((*cls.DEFAULTS, *cls.REQUIRED, *cls.attribute_map, "clip_qkv"))

    @property
    def architecture(self) -> Architecture:
        scale = float(self.d_model**0.5)
        return Architecture(
            num_embeddings=self.embedding_size,
            rotary_dim=self.head_dim,
            dense_width=self.mlp_hidden_size,
            layer_names=tuple(map(self._layer_name, range(self.n_layers))),
            rotates_in_fp32=self.rope_full_precision,
            has_qkv_bias=self.include_bias or bool(self.include_qkv_bias),
            has_bias=self.include_bias,
            norms_all_heads=self.attention_layer_norm,
            embedding_scale=scale if self.input_emb_norm else 1.0,
            logits_scale=1.0 / scale if self.scale_logits else 1.0,
            module_names=MODULE_NAMES,
        )

    def _layer_name(self, layer: int) -> str:
        if self.block_group_size == 1:
            return f"model.transformer.blocks.{layer}"
        group, member = divmod(layer, self.block_group_size)
        return f"model.transformer.block_groups.{group}.{member}"


def _primary_names(
    values: Mapping[str, Any], aliases: Mapping[str, str], unseen: Collection[str]
) -> dict[str, Any]:
    """Rename each alias to its primary name; if both are given, the primary name counts.

    An alias in `unseen` with a different value is refused.
    """
    primary = {key: value for key, value in values.items() if key not in aliases}
    for alias, name in aliases.items():
        if alias not in values:
            continue
        both = (values[alias], primary.setdefault(name, values[alias]))
        if alias in unseen and None not in both and both[0] != both[1]:
            refuse(values, alias, f"{both[1]!r}, as {name} says, or null")
    return primary


def _resolve_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Fill the keys whose null means "follow another key"."""
    for key in ("d_model", "n_heads", "n_layers", "vocab_size", "mlp_ratio"):
        check_positive(values, key, whole=key != "mlp_ratio")
    if values["mlp_hidden_size"] is None:
        values["mlp_hidden_size"] = int(values["mlp_ratio"] * values["d_model"])
    if values["embedding_size"] is None:
        values["embedding_size"] = values["vocab_size"]
    multi_query = values["multi_query_attention"]
    if values["n_kv_heads"] is None:
        values["n_kv_heads"] = 1 if multi_query else values["n_heads"]
    elif multi_query is not None:
        implied = 1 if multi_query else values["n_heads"]
        if values["n_kv_heads"] != implied:
            wanted = f"null, or {implied} as multi_query_attention {multi_query!r} implies"
            refuse(values, "n_kv_heads", wanted)
    return values


def _check_supported(values: Mapping[str, Any]) -> None:
    """Refuse every option of the public configuration class that is not supported."""
    only: dict[str, bool | str] = {
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rope": True,
        "alibi": False,
        "layer_norm_with_affine": True,
    }
    check_only(values, only)
    if values["attention_layer_norm"] and not values["attention_layer_norm_with_affine"]:
        refuse(values, "attention_layer_norm_with_affine", "only true is supported")
    norm_bias = values["bias_for_layer_norm"]
    if norm_bias or (norm_bias is None and values["include_bias"]):
        # Null follows include_bias.
        refuse(values, "bias_for_layer_norm", "only false is supported")
    if values.get("clip_qkv") is not None:
        refuse(values, "clip_qkv", "only null is supported")


def _check_shapes(values: Mapping[str, Any]) -> None:
    """Refuse sizes and ids that contradict each other."""
    whole = ("n_kv_heads", "mlp_hidden_size", "embedding_size", "block_group_size")
    for key in (*whole, "max_sequence_length"):
        check_positive(values, key)
    for key in ("rope_theta", "rms_norm_eps"):
        check_positive(values, key, whole=False)
    if values["n_layers"] % values["block_group_size"]:
        refuse(values, "block_group_size", f"a divisor of n_layers {values['n_layers']}")
    if values["embedding_size"] < values["vocab_size"]:
        refuse(values, "embedding_size", f"at least vocab_size {values['vocab_size']}, or null")
    check_mask_id(values, "embedding_size")

# SPDX-License-Identifier: Apache-2.0
"""The LLaDA forward pass as plainly as it can be written.

Sources: the LLaDA paper (arXiv:2502.09992) and the public model card with its configuration.
Letters as in `llama_model`; K key/value heads, M MLP width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from tests.reference.layers import split_heads
from tests.reference.llama_model import LlamaReference

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tests.reference.llama_model import Config, Shapes

ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
}
# What a layer's modules are called instead of as Llama's are, and those beside the layers.
OF_LAYERS = {
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
BESIDE = {"model.norm": "model.transformer.ln_f", "lm_head": "model.transformer.ff_out"}


def under_both_names(config: Config) -> Config:
    """The configuration with LLaDA's keys and Hugging Face's; LLaDA's come first."""
    values = dict(config)
    for alias, name in ALIASES.items():
        if alias in values:
            values.setdefault(name, values[alias])
    if values.get("n_kv_heads") is None:
        values["n_kv_heads"] = 1 if values.get("multi_query_attention") else values["n_heads"]
    if values.get("mlp_hidden_size") is None:
        values["mlp_hidden_size"] = values["mlp_ratio"] * values["d_model"]
    return values | {alias: values[name] for alias, name in ALIASES.items() if name in values}


class LLaDAReference(LlamaReference):
    """A LLaDA checkpoint. The logits at a position predict the token at that position."""

    embedding = "model.transformer.wte.weight"
    supported: ClassVar[Config] = {
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "rope": True,
        "alibi": False,
        "bias_for_layer_norm": False,
        "layer_norm_with_affine": True,
        "attention_layer_norm_with_affine": True,
    }

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        super().__init__({"rms_norm_eps": 1e-5} | under_both_names(config), weights)
        width = self.config["d_model"]
        if self.config.get("input_emb_norm"):
            self.embedding_scale = width**0.5
        if self.config.get("scale_logits"):
            self.logits_scale = 1.0 / math.sqrt(width)
        self.rotates_in_fp32 = self.config.get("rope_full_precision", True)

    @classmethod
    def tensor_shapes(cls, config: Config) -> Shapes:
        config = under_both_names(config)
        d, m = config["d_model"], config["mlp_hidden_size"]
        v = config.get("embedding_size") or config["vocab_size"]
        kv = config["n_kv_heads"] * d // config["n_heads"]
        has_bias = config.get("include_bias", False)
        qkv_bias = has_bias or config.get("include_qkv_bias", False)
        shapes: Shapes = {cls.embedding: (v, d)}

        def add_linear(name: str, num_out: int, num_in: int, has_bias: bool = has_bias) -> None:
            shapes[f"{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{name}.bias"] = (num_out,)

        for layer in range(config["n_layers"]):
            block = block_prefix(config, layer)
            shapes[f"{block}.attn_norm.weight"] = (d,)
            for part, num_out in (("q", d), ("k", kv), ("v", kv)):
                add_linear(f"{block}.{part}_proj", num_out, d, qkv_bias)
            if config.get("attention_layer_norm"):
                shapes[f"{block}.q_norm.weight"] = (d,)
                shapes[f"{block}.k_norm.weight"] = (kv,)
            add_linear(f"{block}.attn_out", d, d)
            shapes[f"{block}.ff_norm.weight"] = (d,)
            add_linear(f"{block}.ff_proj", m, d)
            add_linear(f"{block}.up_proj", m, d)
            add_linear(f"{block}.ff_out", d, m)
        shapes["model.transformer.ln_f.weight"] = (d,)
        if not config["weight_tying"]:
            add_linear("model.transformer.ff_out", v, d)
        return shapes

    def heads(
        self, path: str, h: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.linear(f"{path}.{part}_proj", h) for part in "qkv")
        if self.config.get("attention_layer_norm"):  # over all heads at once, before the split
            q, k = self.normed(f"{path}.q_norm", q), self.normed(f"{path}.k_norm", k)
        q, k, v = (split_heads(y, self.head_dim) for y in (q, k, v))
        return self.rotated(q, positions), self.rotated(k, positions), v

    def stored(self, name: str) -> str:
        if name in BESIDE:
            return BESIDE[name]
        _, _, layer, module = name.split(".", 3)
        return f"{block_prefix(self.config, int(layer))}.{OF_LAYERS[module]}"


def block_prefix(config: Config, layer: int) -> str:
    """The tensor name prefix of a layer: plain, or by groups when block_group_size > 1."""
    size = config.get("block_group_size", 1)
    if size == 1:
        return f"model.transformer.blocks.{layer}"
    return f"model.transformer.block_groups.{layer // size}.{layer % size}"

# SPDX-License-Identifier: Apache-2.0
"""The LLaDA-MoE family at tiny size.

Configuration keys, tensor names and forward pass follow the released LLaDA-MoE-7B-A1B-Instruct
(https://huggingface.co/inclusionAI/LLaDA-MoE-7B-A1B-Instruct): query and key are normed per head,
and every feed-forward is a mixture of experts whose weights are not renormalised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from tiny_model.decoder import (
    Attention,
    Decoder,
    GatedMLP,
    Layer,
    MixtureOfExperts,
    head_width,
)
from tiny_model.decoding import semi_autoregressive
from tiny_model.family import Family, SpecialTokens, TokenIds
from tiny_model.layers import embedding_rows

if TYPE_CHECKING:
    from torch import nn

SPECIAL_TOKENS = SpecialTokens(
    bos="<|startoftext|>",
    eos="<|endoftext|>",
    mask="<|mask|>",
    others=("<role>", "</role>"),
    eot="<|role_end|>",
)

ROLES = ("SYSTEM", "HUMAN", "ASSISTANT")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% set role = 'HUMAN' if message['role'] == 'user' else message['role'] | upper %}"
    "{{ '<role>' + role + '</role>' + message['content'] + '<|role_end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<role>ASSISTANT</role>' }}"
    "{% endif %}"
)


def config(tokens: TokenIds) -> dict[str, Any]:
    """Return the contents of config.json: LLaDA-MoE-7B-A1B's keys, at tiny size and in fp32."""
    num_layers = 4
    return {
        "architectures": ["LLaDAMoEModelLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "dense_intermediate_size": 256,
        "eos_token_id": tokens.eos,
        "expert_intermediate_size": 128,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "mask_token_id": tokens.mask,
        "max_position_embeddings": 8192,
        "model_type": "llada",  # the released value; the architecture distinguishes it from LLaDA
        "moe_layer_freq": [1] * num_layers,
        "moe_router_enable_expert_bias": False,
        "moe_router_score_function": "softmax",
        "norm_topk_prob": False,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": 4,
        "pad_token_id": tokens.eos,
        "partial_rotary_factor": 1.0,
        "qk_layernorm": True,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 50000,
        "router_aux_loss_coef": 0.01,
        "shared_expert_intermediate_size": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": False,
        "vocab_size": embedding_rows(tokens.vocab_size),
    }


def network(config: dict[str, Any]) -> Decoder:
    """Build LLaDA-MoE with random weights; its `state_dict` has the released checkpoints' names."""

    def make_layer(number: int) -> Layer:
        if config["moe_layer_freq"][number]:
            has_bias = config["moe_router_enable_expert_bias"]
            inner_width = config["expert_intermediate_size"]
            mlp: nn.Module = MixtureOfExperts(config, inner_width, has_bias=has_bias)
        else:
            mlp = GatedMLP(config["hidden_size"], config["dense_intermediate_size"])
        norm: Literal["", "head"] = "head" if config["qk_layernorm"] else ""
        return Layer(config, Attention(config, qk_norm=norm, clip=config["clip_qkv"]), mlp)

    rotary_dim = int(config["partial_rotary_factor"] * head_width(config))
    return Decoder(config, make_layer, rotary_dim=rotary_dim)


FAMILY = Family(
    name="llada-moe",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=ROLES,
    config=config,
    network=network,
    decode=semi_autoregressive,
)

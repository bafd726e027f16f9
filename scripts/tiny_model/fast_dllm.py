# SPDX-License-Identifier: Apache-2.0
"""The Fast-dLLM v2 family at tiny size.

Configuration keys, tensor names and forward pass follow the released Fast_dLLM_v2_7B (Wu et al.
2025, arXiv:2509.26328): Qwen2.5 under a block-causal mask. Row i predicts token i + 1, so that the
last row of a finished block gives the first token of the next one.
"""

from __future__ import annotations

from typing import Any

from tiny_model.decoder import Attention, Decoder, GatedMLP, Layer
from tiny_model.decoding import hierarchy_block
from tiny_model.dream import CHAT_TEMPLATE, SYSTEM_MESSAGE
from tiny_model.family import Family, SpecialTokens, TokenIds
from tiny_model.layers import embedding_rows
from tiny_model.settings import BLOCK_LENGTHS

SPECIAL_TOKENS = SpecialTokens(
    bos=None,
    eos="<|endoftext|>",
    mask="|<MASK>|",
    others=("<|im_start|>",),
    eot="<|im_end|>",
    names_mask=False,
)


def config(tokens: TokenIds) -> dict[str, Any]:
    """Contents of config.json: the keys of Fast_dLLM_v2_7B's, at tiny size and in fp32."""
    return {
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "attention_dropout": 0.0,
        "bd_size": BLOCK_LENGTHS["fast-dllm"],
        "bos_token_id": tokens.eos,  # as released
        "eos_token_id": tokens.eot,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "max_position_embeddings": 32768,
        "max_window_layers": 4,
        "model_type": "Fast_dLLM_Qwen",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": embedding_rows(tokens.vocab_size),
    }


def network(config: dict[str, Any]) -> Decoder:
    """Fast-dLLM v2 with random weights; its `state_dict` bears the released checkpoints' names."""

    def make_layer(_: int) -> Layer:
        attention = Attention(config, qkv_bias=True, qk_norm=False)
        return Layer(
            config, attention, GatedMLP(config["hidden_size"], config["intermediate_size"])
        )

    return Decoder(config, make_layer, shift_rows=True, block_length=config["bd_size"])


FAMILY = Family(
    name="fast-dllm",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=("\n", "system", "user", "assistant", SYSTEM_MESSAGE),
    config=config,
    network=network,
    decode=hierarchy_block,
    lists_eot=True,
)

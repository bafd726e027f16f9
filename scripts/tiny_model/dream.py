# SPDX-License-Identifier: Apache-2.0
"""The Dream family at tiny size.

Configuration keys, tensor names and forward pass follow the released Dream-v0-Instruct-7B (Ye et
al. 2025, arXiv:2508.15487, https://github.com/DreamLM/Dream): Qwen2.5 without its causal mask. As
in its autoregressive parent, row i predicts token i + 1.
"""

from __future__ import annotations

from typing import Any

from tiny_model.decoder import Attention, Decoder, GatedMLP, Layer
from tiny_model.decoding import dream
from tiny_model.family import Family, SpecialTokens, TokenIds
from tiny_model.layers import embedding_rows

SPECIAL_TOKENS = SpecialTokens(
    bos="<|beginoftext|>",
    eos="<|endoftext|>",
    mask="<|mask|>",
    others=("<|im_start|>",),
    eot="<|im_end|>",
)

SYSTEM_MESSAGE = "You are a helpful assistant."
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + SYSTEM_MESSAGE + "<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% endif %}"
)


def config(tokens: TokenIds) -> dict[str, Any]:
    """Contents of config.json: the keys of Dream-v0-Instruct-7B's, at tiny size and in fp32."""
    return {
        "architectures": ["DreamModel"],
        "attention_dropout": 0.0,
        "bos_token_id": tokens.eos,  # as released: not the tokenizer's begin-of-text
        "eos_token_id": tokens.eos,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "mask_token_id": tokens.mask,
        "max_position_embeddings": 4096,
        "max_window_layers": 4,
        "model_type": "Dream",
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": tokens.eos,
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
    """Dream with random weights; its `state_dict` bears the released checkpoints' names."""

    def make_layer(_: int) -> Layer:
        attention = Attention(config, qkv_bias=True, qk_norm=False)
        return Layer(
            config, attention, GatedMLP(config["hidden_size"], config["intermediate_size"])
        )

    return Decoder(config, make_layer, shift_rows=True)


FAMILY = Family(
    name="dream",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=("\n", "system", "user", "assistant", SYSTEM_MESSAGE),
    config=config,
    network=network,
    decode=dream,
)

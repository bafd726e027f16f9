# SPDX-License-Identifier: Apache-2.0
"""The SDAR family at tiny size.

Configuration keys, tensor names and forward pass follow the released SDAR-8B-Chat (Cheng et al.
2025, arXiv:2510.06303, https://github.com/JetAstra/SDAR): Qwen3 under a block-causal mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tiny_model.decoder import Attention, Decoder, GatedMLP, Layer
from tiny_model.decoding import low_confidence_dynamic
from tiny_model.family import Family, SpecialTokens, TokenIds
from tiny_model.layers import embedding_rows
from tiny_model.settings import BLOCK_LENGTHS

SPECIAL_TOKENS = SpecialTokens(
    bos=None,
    eos="<|endoftext|>",
    mask="<|MASK|>",
    others=("<|im_start|>", "<think>", "</think>"),
    eot="<|im_end|>",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}"
    "{% endif %}"
)


def config(tokens: TokenIds) -> dict[str, Any]:
    """Contents of config.json: the keys of SDAR-8B-Chat's, at tiny size and in fp32."""
    return {
        "architectures": ["SDARForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": BLOCK_LENGTHS["sdar"],
        "bos_token_id": tokens.eos,  # as released
        "eos_token_id": tokens.eos,
        "head_dim": 48,  # heads are wider than the width's share, as in SDAR-4B
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "mask_token_id": tokens.mask,
        "max_position_embeddings": 32768,
        "max_window_layers": 4,
        "model_type": "sdar",
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
    """SDAR with random weights; its `state_dict` bears the released checkpoints' names."""

    def make_layer(_: int) -> Layer:
        attention = Attention(config, qkv_bias=False, qk_norm=True)
        return Layer(
            config, attention, GatedMLP(config["hidden_size"], config["intermediate_size"])
        )

    return Decoder(config, make_layer, block_length=config["block_size"])


FAMILY = Family(
    name="sdar",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=("\n", "\n\n", "system", "user", "assistant"),
    config=config,
    network=network,
    decode=partial(low_confidence_dynamic, threshold=0.85),
    lists_eot=True,
)

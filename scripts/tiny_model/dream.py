# SPDX-License-Identifier: Apache-2.0
"""The Dream family at tiny size.

Configuration keys, tensor names and forward pass follow the released Dream-v0-Instruct-7B (Ye et
al. 2025, arXiv:2508.15487, https://github.com/DreamLM/Dream): Qwen2.5 without its causal mask. Row
i predicts token i + 1, as in its autoregressive parent.
"""

from __future__ import annotations

from typing import Any

from tiny_model.decoder import Decoder, dense_network, qwen_config
from tiny_model.decoding import dream
from tiny_model.family import Family, SpecialTokens, TokenIds

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
    """Return the contents of config.json: Dream-v0-Instruct-7B's keys, at tiny size and in fp32."""
    return qwen_config(
        tokens,
        architectures=["DreamModel"],
        mask_token_id=tokens.mask,
        max_position_embeddings=4096,
        model_type="Dream",
        pad_token_id=tokens.eos,
    )


def network(config: dict[str, Any]) -> Decoder:
    """Build the family's network; its `state_dict` has the released checkpoints' names."""
    return dense_network(config, qkv_bias=True, shift_rows=True)


FAMILY = Family(
    name="dream",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=("\n", "system", "user", "assistant", SYSTEM_MESSAGE),
    config=config,
    network=network,
    decode=dream,
)

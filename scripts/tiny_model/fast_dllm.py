# SPDX-License-Identifier: Apache-2.0
"""The Fast-dLLM v2 family at tiny size.

Configuration keys, tensor names and forward pass follow the released Fast_dLLM_v2_7B (Wu et al.
2025, arXiv:2509.26328): Qwen2.5 under a block-causal mask. Row i predicts token i + 1, so the last
row of a finished block gives the first token of the next block.
"""

from __future__ import annotations

from typing import Any

from tiny_model.decoder import Decoder, dense_network, qwen_config
from tiny_model.decoding import hierarchy_block
from tiny_model.dream import CHAT_TEMPLATE, SYSTEM_MESSAGE
from tiny_model.family import Family, SpecialTokens, TokenIds
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
    """Return the contents of config.json: Fast_dLLM_v2_7B's keys, at tiny size and in fp32."""
    return qwen_config(
        tokens,
        architectures=["Fast_dLLM_QwenForCausalLM"],
        bd_size=BLOCK_LENGTHS["fast-dllm"],
        eos_token_id=tokens.eot,
        max_position_embeddings=32768,
        model_type="Fast_dLLM_Qwen",
    )


def network(config: dict[str, Any]) -> Decoder:
    """Build the family's network; its `state_dict` has the released checkpoints' names."""
    return dense_network(config, qkv_bias=True, shift_rows=True, block_length=config["bd_size"])


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

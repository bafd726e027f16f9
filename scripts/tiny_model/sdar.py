# SPDX-License-Identifier: Apache-2.0
"""The SDAR family at tiny size.

Configuration keys, tensor names and forward pass follow the released SDAR-8B-Chat (Cheng et al.
2025, arXiv:2510.06303, https://github.com/JetAstra/SDAR): Qwen3 under a block-causal mask.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from tiny_model.decoder import (
    Attention,
    Decoder,
    GatedMLP,
    Layer,
    MixtureOfExperts,
    qwen_config,
)
from tiny_model.decoding import low_confidence_dynamic
from tiny_model.family import Family, SpecialTokens, TokenIds
from tiny_model.settings import BLOCK_LENGTHS

if TYPE_CHECKING:
    from torch import nn

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
    """Return the contents of config.json: SDAR-8B-Chat's keys, at tiny size and in fp32."""
    return qwen_config(
        tokens,
        architectures=["SDARForCausalLM"],
        attention_bias=False,
        block_size=BLOCK_LENGTHS["sdar"],
        head_dim=48,  # heads are wider than hidden_size / num_attention_heads, as in SDAR-4B
        mask_token_id=tokens.mask,
        max_position_embeddings=32768,
        model_type="sdar",
        pad_token_id=tokens.eos,
    )


def network(config: dict[str, Any]) -> Decoder:
    """Build the family's network; its `state_dict` has the released checkpoints' names.

    If the configuration has the keys of SDAR's mixtures of experts (those of Qwen3-MoE), the
    network is a mixture of experts.
    """
    width, dense = config["hidden_size"], config.get("mlp_only_layers", ())
    step = config.get("decoder_sparse_step", 1)  # every `step`-th layer has experts

    def make_layer(number: int) -> Layer:
        has_experts = "num_experts" in config and number not in dense and not (number + 1) % step
        if has_experts:
            sums_to_one, inner_width = config["norm_topk_prob"], config["moe_intermediate_size"]
            mlp: nn.Module = MixtureOfExperts(config, inner_width, makes_up_one=sums_to_one)
        else:
            mlp = GatedMLP(width, config["intermediate_size"])
        return Layer(config, Attention(config, qk_norm="head"), mlp)

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

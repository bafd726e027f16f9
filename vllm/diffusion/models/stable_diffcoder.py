# SPDX-License-Identifier: Apache-2.0
"""Stable-DiffCoder (ByteDance Seed 2026), whose checkpoints have Llama's model type.

Llama with a block-causal mask; logits at a position predict the token at that position. Only the
tokenizer defines the mask token.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.diffusion.models.diffullama import DiffuLlamaConfig


class StableDiffCoderConfig(DiffuLlamaConfig):
    """config.json of Stable-DiffCoder, with Llama's keys; see `StandardConfig`."""

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **DiffuLlamaConfig.DEFAULTS,
        "vocab_size": 155136,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "block_size": 4,
    }

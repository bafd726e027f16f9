# SPDX-License-Identifier: Apache-2.0
"""SDAR (Cheng et al. 2025, arXiv:2510.06303), and checkpoints of the same architecture (TraDo).

A Qwen3 transformer under a block-causal mask: heads of a width of their own, queries and keys
normed before they are rotated, no biases. Logits at a position predict the token at that position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.standard_config import StandardConfig

if TYPE_CHECKING:
    from vllm.diffusion.models.config import Architecture


class SDARConfig(StandardConfig):
    """config.json of SDAR; see `StandardConfig`."""

    model_type: ClassVar[str] = "sdar"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "use_sliding_window": False,
    }
    ONLY: ClassVar[dict[str, bool | str]] = {**StandardConfig.ONLY, "attention_bias": False}

    @property
    def architecture(self) -> Architecture:
        return super().architecture._replace(norms_each_head=True)

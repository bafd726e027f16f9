# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM v2 (Wu et al. 2025, arXiv:2509.26328).

A Qwen2.5 transformer under a block-causal mask, with biases on queries, keys and values. The logits
of row i predict the token at position i + 1, as in the model that it was trained from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.standard_config import StandardConfig

if TYPE_CHECKING:
    from vllm.diffusion.models.config import Architecture


class FastDLLMConfig(StandardConfig):
    """config.json of Fast-dLLM v2, which does not name the mask token; see `StandardConfig`."""

    model_type: ClassVar[str] = "Fast_dLLM_Qwen"
    block_length_key: ClassVar[str] = "bd_size"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "use_sliding_window": False,
    }

    @property
    def architecture(self) -> Architecture:
        return super().architecture._replace(has_qkv_bias=True)

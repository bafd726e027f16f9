# SPDX-License-Identifier: Apache-2.0
"""DiffuLLaMA (Gong et al. 2024, arXiv:2410.17891), whose checkpoints have Llama's model type.

The model is Llama without its causal mask. The logits of row i predict the token at position i + 1,
as in the model that it was trained from. A mask token in config.json or in the tokenizer
distinguishes a checkpoint from Llama's (`models/llamas.py`); upstream runs all other Llama
checkpoints.
"""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.diffusion.models.standard_config import StandardConfig


class DiffuLlamaConfig(StandardConfig):
    """config.json of DiffuLLaMA, with Llama's keys; see `StandardConfig`."""

    model_type: ClassVar[str] = "llama"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }
    HARMLESS: ClassVar[tuple[str, ...]] = ()
    ONLY: ClassVar[dict[str, bool | str]] = {
        **StandardConfig.ONLY,
        "attention_bias": False,
        "mlp_bias": False,
    }

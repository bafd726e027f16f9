# SPDX-License-Identifier: Apache-2.0
"""Dream (Ye et al. 2025, arXiv:2508.15487), and checkpoints of the same architecture.

A Qwen2 transformer without its causal mask: grouped heads, biases on queries, keys and values,
and rotary tables in the model dtype. The logits of row i predict the token at position i + 1;
they are computed as they are, and whoever reads them reads the row before (`Family.logit_shift`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.config_checks import check_id
from vllm.diffusion.models.standard_config import StandardConfig

if TYPE_CHECKING:
    from vllm.diffusion.models.config import Architecture


class DreamConfig(StandardConfig):
    """config.json of Dream; see `StandardConfig`."""

    model_type: ClassVar[str] = "Dream"

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
        "eos_token_id": 151643,
        "pad_token_id": 151643,
        "mask_token_id": 151666,
    }

    if TYPE_CHECKING:
        eos_token_id: int
        pad_token_id: int
        mask_token_id: int

    def check_more(self, values: dict[str, Any]) -> None:
        check_id(values, "mask_token_id", "vocab_size")

    @property
    def architecture(self) -> Architecture:
        return super().architecture._replace(has_qkv_bias=True)

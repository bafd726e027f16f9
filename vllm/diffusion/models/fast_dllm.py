# SPDX-License-Identifier: Apache-2.0
"""Fast-dLLM v2 (Wu et al. 2025, arXiv:2509.26328).

A Qwen2.5 transformer with a block-causal mask, and with biases on queries, keys and values. The
logits of row i predict the token at position i + 1, as in the model that it was trained from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.standard_config import QWEN_DEFAULTS, StandardConfig

if TYPE_CHECKING:
    from vllm.diffusion.models.config import Architecture


class FastDLLMConfig(StandardConfig):
    """config.json of Fast-dLLM v2, which does not name the mask token; see `StandardConfig`."""

    model_type: ClassVar[str] = "Fast_dLLM_Qwen"
    block_length_key: ClassVar[str] = "bd_size"

    DEFAULTS: ClassVar[dict[str, Any]] = QWEN_DEFAULTS
    ONLY: ClassVar[dict[str, bool | str]] = {**StandardConfig.ONLY, "attention_bias": True}

    @property
    def architecture(self) -> Architecture:
        return super().architecture._replace(has_qkv_bias=True)

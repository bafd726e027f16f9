# SPDX-License-Identifier: Apache-2.0
"""Dream (Ye et al. 2025, arXiv:2508.15487), and checkpoints of its architecture.

A Qwen2 transformer without its causal mask: grouped heads, biases on queries, keys and values, and
rotary tables in the model dtype. The logits of row i predict the token at position i + 1. They are
computed without a shift, and consumers read the previous row (`Family.logit_shift`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.standard_config import QWEN_DEFAULTS, StandardConfig

if TYPE_CHECKING:
    from vllm.diffusion.models.config import Architecture


class DreamConfig(StandardConfig):
    """config.json of Dream; see `StandardConfig`."""

    model_type: ClassVar[str] = "Dream"

    eos_token_id: ClassVar[int] = 151643
    pad_token_id: ClassVar[int] = 151643
    DEFAULTS: ClassVar[dict[str, Any]] = QWEN_DEFAULTS
    ONLY: ClassVar[dict[str, bool | str]] = {**StandardConfig.ONLY, "attention_bias": True}

    @property
    def architecture(self) -> Architecture:
        return super().architecture._replace(has_qkv_bias=True)

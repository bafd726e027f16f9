# SPDX-License-Identifier: Apache-2.0
"""Dream (Ye et al. 2025, arXiv:2508.15487), and checkpoints of its architecture.

A Qwen2 transformer without its causal mask: grouped heads, biases on queries, keys and values, and
rotary tables in the model dtype. The logits of row i predict the token at position i + 1; they are
computed unshifted, and readers take the row before (`Family.logit_shift`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.config_checks import check_mask_id
from vllm.diffusion.models.standard_config import QWEN_DEFAULTS, StandardConfig

if TYPE_CHECKING:
    from vllm.diffusion.models.config import Architecture


class DreamConfig(StandardConfig):
    """config.json of Dream; see `StandardConfig`."""

    model_type: ClassVar[str] = "Dream"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **QWEN_DEFAULTS,
        "eos_token_id": 151643,
        "pad_token_id": 151643,
        "mask_token_id": 151666,
    }

    def check_more(self, values: dict[str, Any]) -> None:
        check_mask_id(values)

    @property
    def architecture(self) -> Architecture:
        return super().architecture._replace(has_qkv_bias=True)

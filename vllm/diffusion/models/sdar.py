# SPDX-License-Identifier: Apache-2.0
"""SDAR (Cheng et al. 2025, arXiv:2510.06303), and checkpoints of its architecture (TraDo).

A Qwen3 transformer with a block-causal mask: a separate `head_dim`, queries and keys normed before
they are rotated, no biases. Logits at a position predict the token at that position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.diffusion.models.standard_config import QWEN_DEFAULTS, StandardConfig

if TYPE_CHECKING:
    from vllm.diffusion.models.config import Architecture


class SDARConfig(StandardConfig):
    """config.json of SDAR; see `StandardConfig`."""

    model_type: ClassVar[str] = "sdar"

    DEFAULTS: ClassVar[dict[str, Any]] = {
        **QWEN_DEFAULTS,
        "head_dim": 128,
        "attention_bias": False,
    }
    ONLY: ClassVar[dict[str, bool | str]] = {**StandardConfig.ONLY, "attention_bias": False}

    @property
    def architecture(self) -> Architecture:
        return super().architecture._replace(norms_each_head=True)

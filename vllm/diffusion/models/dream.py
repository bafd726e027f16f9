# SPDX-License-Identifier: Apache-2.0
"""Dream (Ye et al. 2025, arXiv:2508.15487), and checkpoints of the same architecture.

A Qwen2 transformer without its causal mask: grouped heads, biases on queries, keys and values,
and rotary tables in the model dtype. The logits of row i predict the token at position i + 1;
they are computed as they are, and whoever reads them reads the row before (`Family.logit_shift`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from vllm.diffusion.families import DREAM, Family
from vllm.diffusion.models.llama import (
    AttentionWeights,
    DenseMLP,
    LlamaNamedLayer,
    LlamaNamedModel,
)

if TYPE_CHECKING:
    from vllm.diffusion.models.configs import DreamConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig


class DreamModelLM(LlamaNamedModel):
    """A Dream checkpoint as a vLLM model."""

    family: ClassVar[Family] = DREAM
    config: DreamConfig

    def make_layer(
        self, index: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> LlamaNamedLayer:
        config = self.config
        attention = AttentionWeights(
            config, quant_config, f"{prefix}.self_attn", bias=True, head_norm=False
        )
        mlp = DenseMLP(config.hidden_size, config.intermediate_size, quant_config, f"{prefix}.mlp")
        return LlamaNamedLayer(config, attention, mlp)

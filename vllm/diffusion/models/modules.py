# SPDX-License-Identifier: Apache-2.0
"""Weights of a layer, with Llama's names, as described by a configuration.

Only q, k and v are fused, and gate and up. `destinations` maps the checkpoint's modules to these
places, by Llama's names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vllm.diffusion import ops
from vllm.diffusion.layers.attention import SelfAttention
from vllm.diffusion.layers.invariant_attention import with_invariant_attention
from vllm.diffusion.layers.mlp import GatedMLP
from vllm.diffusion.layers.norm import AllHeadsRMSNorm, RMSNorm
from vllm.diffusion.layers.parallel import without_weight_packing
from vllm.diffusion.models.weights import Destination
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

if TYPE_CHECKING:
    from vllm.diffusion.models.config import DiffusionConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig


class AttentionWeights(nn.Module):
    """Projections of attention, with the norms of queries and keys if there are any."""

    def __init__(
        self, config: DiffusionConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.config, architecture = config, config.architecture
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv_proj = without_weight_packing(
            QKVParallelLinear(
                hidden_size=config.hidden_size,
                head_size=config.head_dim,
                total_num_heads=heads,
                total_num_kv_heads=kv_heads,
                bias=architecture.has_qkv_bias,
                quant_config=quant_config,
                prefix=f"{prefix}.qkv_proj",
            )
        )
        self.o_proj = without_weight_packing(
            RowParallelLinear(
                heads * config.head_dim,
                config.hidden_size,
                bias=architecture.has_bias,
                quant_config=quant_config,
                prefix=f"{prefix}.o_proj",
            )
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if architecture.norms_each_head:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        elif architecture.norms_all_heads:
            self.q_norm = AllHeadsRMSNorm(heads, config.head_dim, config.rms_norm_eps)
            self.k_norm = AllHeadsRMSNorm(kv_heads, config.head_dim, config.rms_norm_eps)

    def stage(self, norm: RMSNorm) -> SelfAttention:
        """Create the stages over these weights, after they are loaded."""
        attention = SelfAttention(
            norm,
            ops.projection_of(self.qkv_proj),
            ops.projection_of(self.o_proj),
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=self.config.head_dim,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            clip=self.config.architecture.max_qkv,
        )
        return with_invariant_attention(attention) if ops.is_invariant(self) else attention

    def destinations(self, path: str) -> dict[str, Destination]:
        """Return the destination of each module of a checkpoint below `path`."""
        config, fused = self.config, f"{path}.qkv_proj"
        width, head_dim = config.hidden_size, config.head_dim
        q_width = config.num_attention_heads * head_dim
        kv_width = config.num_key_value_heads * head_dim
        destinations = {f"{path}.o_proj": Destination(f"{path}.o_proj", (width, q_width))}
        if config.architecture.has_fused_qkv:
            destinations[fused] = Destination(fused, (q_width + 2 * kv_width, width))
        else:
            for part, rows in (("q", q_width), ("k", kv_width), ("v", kv_width)):
                destinations[f"{path}.{part}_proj"] = Destination(fused, (rows, width), part)
        if self.q_norm is not None:
            q_gains, k_gains = (
                (q_width, kv_width) if config.architecture.norms_all_heads else (head_dim, head_dim)
            )
            destinations[f"{path}.q_norm"] = Destination(f"{path}.q_norm", (q_gains,))
            destinations[f"{path}.k_norm"] = Destination(f"{path}.k_norm", (k_gains,))
        return destinations


class DenseMLP(nn.Module):
    """Matrices of a gated MLP, with width `inner`, or by default the width of dense layers."""

    def __init__(
        self,
        config: DiffusionConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
        inner: int | None = None,
    ) -> None:
        super().__init__()
        architecture = config.architecture
        self.shape = (inner or architecture.dense_width, config.hidden_size)
        inner, width = self.shape
        self.gate_up_proj = without_weight_packing(
            MergedColumnParallelLinear(
                width,
                [inner] * 2,
                bias=architecture.has_bias,
                quant_config=quant_config,
                prefix=f"{prefix}.gate_up_proj",
            )
        )
        self.down_proj = without_weight_packing(
            RowParallelLinear(
                inner,
                width,
                bias=architecture.has_bias,
                quant_config=quant_config,
                prefix=f"{prefix}.down_proj",
            )
        )

    def stage(self, norm: RMSNorm) -> GatedMLP:
        """Create the stage over these weights, after they are loaded."""
        return GatedMLP(
            norm,
            ops.projection_of(self.gate_up_proj),
            ops.projection_of(self.down_proj),
            self.down_proj.input_size_per_partition,
        )

    def destinations(self, path: str) -> dict[str, Destination]:
        """Return the destination of each module of a checkpoint below `path`."""
        fused = f"{path}.gate_up_proj"
        return {
            f"{path}.gate_proj": Destination(fused, self.shape, 0),
            f"{path}.up_proj": Destination(fused, self.shape, 1),
            f"{path}.down_proj": Destination(f"{path}.down_proj", self.shape[::-1]),
        }

# SPDX-License-Identifier: Apache-2.0
"""The feed-forward stage: a gated MLP (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion import ops

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class GatedMLP:
    """The feed-forward stage of one layer, over weights owned elsewhere."""

    norm: RMSNorm
    gate_up_proj: MergedColumnParallelLinear
    down_proj: RowParallelLinear

    def feed_forward(self, x: Tensor) -> None:
        """x += Wdown (silu(Wgate h) * Wup h), h = norm(x); x [R, D], in place."""
        if x.shape[0] == 0:
            return
        gate_up = ops.linear(self.norm(x), self.gate_up_proj)
        ops.add_linear(x, ops.silu_mul(gate_up), self.down_proj)

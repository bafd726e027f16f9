# SPDX-License-Identifier: Apache-2.0
"""The feed-forward stage: a gated MLP (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion import ops

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.buffers import Buffers
    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear


@dataclass(frozen=True)
class GatedMLP:
    """The feed-forward stage of one layer, over weights owned elsewhere."""

    norm: RMSNorm
    gate_up_proj: MergedColumnParallelLinear
    down_proj: RowParallelLinear

    def feed_forward(self, x: Tensor, buffers: Buffers) -> None:
        """x += Wdown (silu(Wgate h) * Wup h), h = norm(x); x [R, D], in place."""
        if x.shape[0] == 0:
            return
        with buffers.scope("feed-forward"):
            rows, width = x.shape[0], self.down_proj.input_size_per_partition
            normed = self.norm(x, out=buffers.take("normed", x.shape, x.dtype))
            gate_up = None
            if ops.is_plain(self.gate_up_proj):
                gate_up = buffers.take("gate and up", (rows, 2 * width), x.dtype)
            else:
                buffers.expect("gate and up", rows * 2 * width * x.element_size())
            activated = buffers.take("activated", (rows, width), x.dtype)
            ops.gated_linear(normed, self.gate_up_proj, activated, gate_up)
            ops.add_linear(x, activated, self.down_proj, product=normed)

# SPDX-License-Identifier: Apache-2.0
"""Feed-forward stage: a gated MLP (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion.core.stages import FreshBuffers, gating

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion import ops
    from vllm.diffusion.core.stages import Buffer, Buffers
    from vllm.diffusion.layers.norm import RMSNorm


@dataclass(frozen=True)
class GatedMLP:
    """Feed-forward stage of one layer; `width` is the width on this rank."""

    norm: RMSNorm
    gate_up_proj: ops.Projection
    down_proj: ops.Projection
    width: int

    @property
    def products(self) -> tuple[ops.Projection, ...]:
        """Projections in the order of their use."""
        return self.gate_up_proj, self.down_proj

    def feed_forward(self, x: Tensor, buffers: Buffers) -> None:
        """Add Wdown (silu(Wgate h) * Wup h) to x [R, D] in place, with h = norm(x)."""
        if x.shape[0] == 0:
            return
        with buffers.scope("feed-forward"):
            wide, rows = gating(x.dtype, x.shape[1], self.width)
            activated = self._activated(wide, len(x), buffers)
            with buffers.scope("feed-forward"):
                aside = FreshBuffers(x.device, buffers)
                out = self.gate_up_proj.rows(rows, len(x), aside)
                self.gate_up_proj.gated(self.norm(x, out), activated, buffers)
            self.down_proj.add_to(x, activated, buffers)

    def project(self, normed: Tensor, out: Tensor, buffers: Buffers) -> None:
        """Write this rank's part of Wdown (silu(Wgate h) * Wup h) to out, for h = normed [R, D]."""
        with buffers.scope("feed-forward"):
            wide, _ = gating(normed.dtype, normed.shape[1], self.width)
            activated = self._activated(wide, len(normed), buffers)
            self.gate_up_proj.gated(normed, activated, buffers)
            self.down_proj.project(activated, out, buffers)

    def _activated(
        self, listed: Buffer, num_rows: int, buffers: Buffers
    ) -> Tensor | ops.QuantisedRows:
        """Allocate silu(gate) * up, quantised if the products allow it."""
        if self.gate_up_proj.quantises:
            return self.down_proj.rows(listed, num_rows, buffers)
        return listed.take(buffers, num_rows)

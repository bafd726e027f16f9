# SPDX-License-Identifier: Apache-2.0
"""The feed-forward stage with experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.diffusion import ops

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.model_executor.layers.linear import ReplicatedLinear


@dataclass(frozen=True)
class ExpertsMLP:
    """The feed-forward stage of a layer with experts, over weights owned elsewhere.

    `gate` is the router [E, D]; `w1` [E, 2I, D] and `w2` [E, D, I] hold this rank's part of every
    expert's width; `bias` [E] shifts the choice where the model has it.
    """

    norm: RMSNorm
    gate: ReplicatedLinear
    w1: nn.Parameter
    w2: nn.Parameter
    num_chosen: int
    bias: nn.Parameter | None = None

    def feed_forward(self, x: Tensor) -> None:
        """x += sum over the chosen experts of weight * expert(norm(x)); x [R, D], in place."""
        if x.shape[0] == 0:
            return
        normed = self.norm(x)
        routing = ops.route(ops.linear(normed, self.gate), self.num_chosen, self.bias)
        ops.add_experts(x, normed, routing, self.w1, self.w2)

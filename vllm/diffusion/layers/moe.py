# SPDX-License-Identifier: Apache-2.0
"""The feed-forward stage with experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm.diffusion import ops
from vllm.distributed import tensor_model_parallel_all_reduce

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vllm.diffusion.layers.norm import RMSNorm
    from vllm.model_executor.layers.linear import ReplicatedLinear


def route(logits: Tensor, num_chosen: int, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The experts of each row and their weights, as the public code of LLaDA-MoE decides them.

    The probabilities are a softmax over all experts in fp32. The weights are those of the chosen
    experts as they are: they do not sum to 1. Among equals the lowest expert is chosen.

    Args:
        logits: [R, E], model dtype.
        num_chosen: k, experts of a row.
        bias: [E], added to the probabilities for the choice only.

    Returns:
        expert ids [R, k] int64, best first, and weights [R, k] in the dtype of the logits.
    """
    probabilities = torch.softmax(logits, dim=-1, dtype=torch.float32)
    scores = probabilities if bias is None else probabilities + bias
    # a stable sort, as topk leaves the order of equals open
    ranked = scores.sort(dim=-1, descending=True, stable=True).indices
    chosen = ranked[:, :num_chosen]
    return chosen, probabilities.gather(-1, chosen).to(logits.dtype)


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
        chosen, weights = route(ops.linear(normed, self.gate), self.num_chosen, self.bias)
        mixed = ops.mix_experts(normed, chosen, weights, self.w1, self.w2)
        x.add_(tensor_model_parallel_all_reduce(mixed))

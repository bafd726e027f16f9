# SPDX-License-Identifier: Apache-2.0
"""The LLaDA-MoE forward pass as plainly as it can be written, one expert at a time.

Source: the public LLaDA-MoE model card and its configuration (arXiv:2509.24389). Letters: B rows,
T positions, D hidden size, E experts, I expert width, k chosen experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch.nn import functional

from tests.reference.layers import split_heads
from tests.reference.llama_model import LlamaReference, experts_shapes, gated_shapes, head_width

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from tests.reference.llama_model import Config, Shapes


def unfuse(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of either layout, in the unfused one.

    Fused: mlp.w1 [E, 2I, D], gate rows before up rows, and mlp.w2 [E, D, I].
    """
    unfused = {}
    for name, tensor in weights.items():
        mlp, _, last = name.rpartition(".")
        if last not in ("w1", "w2"):
            unfused[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            if last == "w2":
                unfused[f"{mlp}.experts.{expert}.down_proj.weight"] = matrix
            else:
                gate, up = matrix.chunk(2)
                unfused[f"{mlp}.experts.{expert}.gate_proj.weight"] = gate
                unfused[f"{mlp}.experts.{expert}.up_proj.weight"] = up
    return unfused


class LLaDAMoEReference(LlamaReference):
    """A LLaDA-MoE checkpoint. The logits at a position predict the token at that position."""

    supported: ClassVar[Config] = {
        "hidden_act": "silu",
        "moe_router_score_function": "softmax",
        "shared_expert_intermediate_size": None,
        "attention_bias": False,
    }

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        super().__init__(config, unfuse(weights))

    @classmethod
    def attention_shapes(cls, config: Config, path: str) -> Shapes:
        shapes, hd = super().attention_shapes(config, path), head_width(config)
        norms: Shapes = {f"{path}.q_norm.weight": (hd,), f"{path}.k_norm.weight": (hd,)}
        return shapes | norms if config["qk_layernorm"] else shapes

    @classmethod
    def mlp_shapes(cls, config: Config, layer: int) -> Shapes:
        mlp, width = f"model.layers.{layer}.mlp", config["hidden_size"]
        if not config["moe_layer_freq"][layer]:
            return gated_shapes(mlp, width, config["dense_intermediate_size"])
        shapes = experts_shapes(mlp, config, config["expert_intermediate_size"])
        if not config.get("moe_router_enable_expert_bias"):
            return shapes
        gate = f"{mlp}.gate.weight"
        return {gate: shapes.pop(gate), f"{mlp}.expert_bias": (config["num_experts"],), **shapes}

    def heads(
        self, path: str, h: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Clipped where the configuration says so, and q and k of each head normed."""
        clip, parts = self.config.get("clip_qkv"), []
        for part in "qkv":
            y = self.linear(f"{path}.{part}_proj", h)
            y = split_heads(y if clip is None else y.clamp(-clip, clip), self.head_dim)
            if self.config["qk_layernorm"] and part != "v":
                y = self.normed(f"{path}.{part}_norm", y)
            parts.append(y if part == "v" else self.rotated(y, positions))
        q, k, v = parts
        return q, k, v

    def mlp(self, layer: int, h: Tensor) -> Tensor:
        if self.config["moe_layer_freq"][layer]:
            return self.experts(f"model.layers.{layer}.mlp", h)
        return super().mlp(layer, h)

    def route(self, mlp: str, h: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [B, T, k] and weights [B, T, k] (model dtype) of hidden states h [B, T, D].

        Probabilities over all experts in fp32; the weights are those of the chosen experts as
        they are, not made to sum to 1. A bias takes part in the choice only. Ties: lowest id.
        """
        scores = functional.linear(h, self.weights[f"{mlp}.gate.weight"])
        wide = torch.promote_types(h.dtype, torch.float32)
        probabilities = torch.softmax(scores.to(wide), dim=-1)
        choice = probabilities
        if self.config.get("moe_router_enable_expert_bias"):
            choice = probabilities + self.weights[f"{mlp}.expert_bias"].to(wide)
        order = torch.sort(choice, dim=-1, descending=True, stable=True).indices
        chosen = order[..., : self.config["num_experts_per_tok"]]
        return chosen, probabilities.gather(-1, chosen).to(h.dtype)

    def experts(self, mlp: str, h: Tensor) -> Tensor:
        """The mixture [B, T, D], summed in the model dtype in ascending order of expert."""
        chosen, weights = self.route(mlp, h)
        total = torch.zeros_like(h)
        for expert in range(self.config["num_experts"]):
            is_chosen = chosen == expert  # [B, T, k]
            weight = (weights * is_chosen).sum(dim=-1)  # one of the k at most
            reached = is_chosen.any(dim=-1)
            output = self.gated(f"{mlp}.experts.{expert}", h[reached])
            total[reached] += output * weight[reached][:, None]
        return total

# SPDX-License-Identifier: Apache-2.0
"""Forward passes under a block-causal mask, as plainly as they can be written.

A position sees its own block and the blocks before it; blocks lie on a grid from position 0. One
batch of rows of equal length, no padding, no kept keys: the whole sequence every time.

Sources: the public configurations and tensor names of SDAR (arXiv:2510.06303), LLaDA2.0
(arXiv:2512.15745) and Fast-dLLM v2 (arXiv:2509.26328). Letters: B rows, T positions, D hidden size,
H heads, hd head width, V logit columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.reference.layers import split_heads
from tests.reference.llama_model import (
    LlamaReference,
    experts_shapes,
    gated_shapes,
    head_width,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tests.reference.llama_model import Config, Shapes


class SDARReference(LlamaReference):
    """An SDAR checkpoint: Qwen3's layers. The logits at a position predict its own token."""

    norms_heads = True


class FastDLLMReference(LlamaReference):
    """A Fast-dLLM v2 checkpoint: Qwen2.5's layers. Row i predicts the token at i + 1."""

    logit_shift = 1

    @classmethod
    def has_qkv_bias(cls, config: Config) -> bool:
        return True


class SDARMoeReference(SDARReference):
    """An SDAR checkpoint with experts: Qwen3-MoE's layers."""

    @classmethod
    def has_experts(cls, config: Config, layer: int) -> bool:
        is_sparse = (layer + 1) % config["decoder_sparse_step"] == 0
        return is_sparse and layer not in config["mlp_only_layers"]

    @classmethod
    def mlp_shapes(cls, config: Config, layer: int) -> Shapes:
        if not cls.has_experts(config, layer):
            return super().mlp_shapes(config, layer)
        return experts_shapes(f"model.layers.{layer}.mlp", config, config["moe_intermediate_size"])

    def mlp(self, layer: int, h: Tensor) -> Tensor:
        if not self.has_experts(self.config, layer):
            return super().mlp(layer, h)
        mlp = f"model.layers.{layer}.mlp"
        logits = self.linear(f"{mlp}.gate", h)
        wide = torch.promote_types(h.dtype, torch.float32)
        weights, chosen = logits.to(wide).softmax(dim=-1).topk(self.config["num_experts_per_tok"])
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(h.dtype)
        total = torch.zeros_like(h)
        for expert in range(self.config["num_experts"]):  # each sum is rounded, in this order
            for place in range(chosen.shape[-1]):
                mine = chosen[..., place] == expert
                term = self.gated(f"{mlp}.experts.{expert}", h[mine])
                total[mine] += term * weights[..., place][mine][:, None]
        return total


class LLaDA2Reference(LlamaReference):
    """A LLaDA2 checkpoint. The logits at a position predict its own token."""

    embedding = "model.word_embeddings.weight"
    attention_name = "attention"
    wide = "expert_bias"

    @classmethod
    def attention_shapes(cls, config: Config, path: str) -> Shapes:
        d, hd = config["hidden_size"], head_width(config)
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        return {
            f"{path}.query_key_value.weight": ((heads + 2 * kv_heads) * hd, d),
            f"{path}.query_layernorm.weight": (hd,),
            f"{path}.key_layernorm.weight": (hd,),
            f"{path}.dense.weight": (d, heads * hd),
        }

    @classmethod
    def mlp_shapes(cls, config: Config, layer: int) -> Shapes:
        if layer < config["first_k_dense_replace"]:
            return super().mlp_shapes(config, layer)
        mlp, d = f"model.layers.{layer}.mlp", config["hidden_size"]
        shapes = experts_shapes(mlp, config, config["moe_intermediate_size"])
        shapes[f"{mlp}.gate.expert_bias"] = (config["num_experts"],)
        inner = config["moe_intermediate_size"] * config["num_shared_experts"]
        return shapes | (gated_shapes(f"{mlp}.shared_experts", d, inner) if inner else {})

    def heads(
        self, path: str, h: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        fused = split_heads(self.linear(f"{path}.query_key_value", h), self.head_dim)
        q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
        q, k = (self.normed(f"{path}.{n}_layernorm", x) for n, x in (("query", q), ("key", k)))
        return self.rotated(q, positions), self.rotated(k, positions), v

    def joined(self, path: str, a: Tensor) -> Tensor:
        return self.linear(f"{path}.dense", a)

    def mlp(self, layer: int, h: Tensor) -> Tensor:
        if layer < self.config["first_k_dense_replace"]:
            return super().mlp(layer, h)
        mlp, num_chosen = f"model.layers.{layer}.mlp", self.config["num_experts_per_tok"]
        out = torch.zeros_like(h)
        for row, token in enumerate(h.flatten(0, 1)):
            scores, ranks = self.scores(mlp, token)
            chosen = ranks.topk(num_chosen).indices
            weights = scores[chosen]
            if num_chosen > 1:
                weights = weights / (weights.sum() + 1e-20)
            weights = weights * self.config["routed_scaling_factor"]
            terms = [self.gated(f"{mlp}.experts.{e}", token) for e in chosen.tolist()]
            total = (torch.stack(terms).to(weights.dtype) * weights[:, None]).sum(dim=0)
            out.flatten(0, 1)[row] = total.to(h.dtype)
        if self.config["num_shared_experts"]:
            out = out + self.gated(f"{mlp}.shared_experts", h)
        return out

    def scores(self, mlp: str, token: Tensor) -> tuple[Tensor, Tensor]:
        """An expert's score [E], and what it is chosen by: -inf outside of the kept groups."""
        wide = torch.promote_types(token.dtype, torch.float32)
        gate = self.weights[f"{mlp}.gate.weight"].to(wide)
        scores = torch.sigmoid(gate @ token.to(wide))
        ranks = scores + self.weights[f"{mlp}.gate.expert_bias"].to(wide)
        groups = ranks.view(self.config["n_group"], -1)
        kept = groups.topk(2, dim=-1).values.sum(dim=-1).topk(self.config["topk_group"]).indices
        masked = torch.full_like(groups, -torch.inf)
        masked[kept] = groups[kept]
        return scores, masked.flatten()

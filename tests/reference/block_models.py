# SPDX-License-Identifier: Apache-2.0
"""Forward passes under a block-causal mask, as plainly as they can be written.

A position sees its own block and the blocks before it; blocks lie on a grid from position 0. One
batch of rows of equal length, no padding, no kept keys: the whole sequence every time.

Sources: the public configurations and tensor names of SDAR (arXiv:2510.06303), LLaDA2.0
(arXiv:2512.15745) and Fast-dLLM v2 (arXiv:2509.26328). Letters: B rows, T positions, D hidden size,
H heads, hd head width, V logit columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from tests.reference.layers import (
    attention,
    check_shapes,
    read_checkpoint,
    rms_norm,
    rotate,
    split_heads,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Self

    from torch import Tensor

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


def block_causal(num_positions: int, block_length: int) -> Tensor:
    """[T, T] bool: whether the position of the row sees that of the column."""
    block = torch.arange(num_positions) // block_length
    return block[None, :] <= block[:, None]


class SDARReference:
    """An SDAR checkpoint: Qwen3's layers. The logits at a position predict its own token."""

    logit_shift: ClassVar[int] = 0
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    attention_name: ClassVar[str] = "self_attn"
    norms_heads: ClassVar[bool] = True
    has_qkv_bias: ClassVar[bool] = False

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        check_shapes(self.tensor_shapes(config), weights)
        self.config = config
        self.weights = dict(weights)
        self.head_dim = head_width(config)

    @classmethod
    def from_checkpoint(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> Self:
        """Reads a folder; dtype is the model dtype (float64 keeps every step in float64)."""
        return cls(*read_checkpoint(path, dtype, wide="expert_bias"))

    @classmethod
    def tensor_shapes(cls, config: Config) -> Shapes:
        """Every tensor of a checkpoint with its shape; matrices are stored [out, in]."""
        d, v = config["hidden_size"], config["vocab_size"]
        shapes: Shapes = {cls.embedding: (v, d)}
        for layer in range(config["num_hidden_layers"]):
            block = f"model.layers.{layer}"
            shapes[f"{block}.input_layernorm.weight"] = (d,)
            shapes |= cls.attention_shapes(config, f"{block}.{cls.attention_name}")
            shapes[f"{block}.post_attention_layernorm.weight"] = (d,)
            shapes |= cls.mlp_shapes(config, layer)
        shapes["model.norm.weight"] = (d,)
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (v, d)
        return shapes

    @classmethod
    def attention_shapes(cls, config: Config, path: str) -> Shapes:
        d, hd = config["hidden_size"], head_width(config)
        q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
        shapes: Shapes = {}
        for part, num_out in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{path}.{part}_proj.weight"] = (num_out, d)
            if cls.has_qkv_bias:
                shapes[f"{path}.{part}_proj.bias"] = (num_out,)
        if cls.norms_heads:
            shapes |= {f"{path}.q_norm.weight": (hd,), f"{path}.k_norm.weight": (hd,)}
        return {**shapes, f"{path}.o_proj.weight": (d, q)}

    @classmethod
    def mlp_shapes(cls, config: Config, layer: int) -> Shapes:
        return gated_shapes(
            f"model.layers.{layer}.mlp", config["hidden_size"], config["intermediate_size"]
        )

    @torch.no_grad()
    def logits(self, ids: Tensor, block_length: int) -> Tensor:
        """Raw logits [B, T, V] of ids int64 [B, T]; those of row i predict i + `logit_shift`."""
        eps = self.config["rms_norm_eps"]
        embedding = self.weights[self.embedding]
        sees = block_causal(ids.shape[1], block_length)
        x = embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            block = f"model.layers.{layer}"
            h = rms_norm(x, self.weights[f"{block}.input_layernorm.weight"], eps)
            x = x + self.attention(f"{block}.{self.attention_name}", h, sees)
            h = rms_norm(x, self.weights[f"{block}.post_attention_layernorm.weight"], eps)
            x = x + self.mlp(layer, h)
        x = rms_norm(x, self.weights["model.norm.weight"], eps)
        tied = self.config["tie_word_embeddings"]
        return functional.linear(x, embedding if tied else self.weights["lm_head.weight"])

    def attention(self, path: str, h: Tensor, sees: Tensor) -> Tensor:
        """The attention of normed rows h [B, T, D], its output projection included."""
        q, k, v = (split_heads(self.linear(f"{path}.{p}_proj", h), self.head_dim) for p in "qkv")
        if self.norms_heads:
            q = rms_norm(q, self.weights[f"{path}.q_norm.weight"], self.config["rms_norm_eps"])
            k = rms_norm(k, self.weights[f"{path}.k_norm.weight"], self.config["rms_norm_eps"])
        q, k = (rotate(y, self.config["rope_theta"], False) for y in (q, k))
        heads = attention(q, k, v, sees)
        return self.linear(f"{path}.o_proj", heads.transpose(1, 2).flatten(2))

    def mlp(self, layer: int, h: Tensor) -> Tensor:
        """The feed-forward of normed rows h [B, T, D]."""
        return self.gated(f"model.layers.{layer}.mlp", h)

    def gated(self, path: str, h: Tensor) -> Tensor:
        gate = functional.silu(self.linear(f"{path}.gate_proj", h))
        return self.linear(f"{path}.down_proj", gate * self.linear(f"{path}.up_proj", h))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(
            x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )


class FastDLLMReference(SDARReference):
    """A Fast-dLLM v2 checkpoint: Qwen2.5's layers. Row i predicts the token at i + 1."""

    logit_shift = 1
    norms_heads = False
    has_qkv_bias = True


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
        return experts_shapes(f"model.layers.{layer}.mlp", config)

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


class LLaDA2Reference(SDARReference):
    """A LLaDA2 checkpoint. The logits at a position predict its own token."""

    embedding = "model.word_embeddings.weight"
    attention_name = "attention"

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
        shapes = experts_shapes(mlp, config)
        shapes[f"{mlp}.gate.expert_bias"] = (config["num_experts"],)
        inner = config["moe_intermediate_size"] * config["num_shared_experts"]
        return shapes | (gated_shapes(f"{mlp}.shared_experts", d, inner) if inner else {})

    def attention(self, path: str, h: Tensor, sees: Tensor) -> Tensor:
        config, hd = self.config, self.head_dim
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        fused = split_heads(self.linear(f"{path}.query_key_value", h), hd)
        q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
        q = rms_norm(q, self.weights[f"{path}.query_layernorm.weight"], config["rms_norm_eps"])
        k = rms_norm(k, self.weights[f"{path}.key_layernorm.weight"], config["rms_norm_eps"])
        turned = int(hd * config["partial_rotary_factor"])
        q, k = (
            torch.cat([rotate(y[..., :turned], config["rope_theta"], False), y[..., turned:]], -1)
            for y in (q, k)
        )
        return self.linear(f"{path}.dense", attention(q, k, v, sees).transpose(1, 2).flatten(2))

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


def head_width(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def gated_shapes(path: str, width: int, inner: int) -> Shapes:
    return {
        f"{path}.gate_proj.weight": (inner, width),
        f"{path}.up_proj.weight": (inner, width),
        f"{path}.down_proj.weight": (width, inner),
    }


def experts_shapes(mlp: str, config: Config) -> Shapes:
    """The router and the experts of a layer."""
    width, inner = config["hidden_size"], config["moe_intermediate_size"]
    shapes: Shapes = {f"{mlp}.gate.weight": (config["num_experts"], width)}
    for expert in range(config["num_experts"]):
        shapes |= gated_shapes(f"{mlp}.experts.{expert}", width, inner)
    return shapes


REFERENCES: dict[str, type[SDARReference]] = {
    "SDARForCausalLM": SDARReference,
    "SDARMoeForCausalLM": SDARMoeReference,
    "LLaDA2MoeModelLM": LLaDA2Reference,
    "Fast_dLLM_QwenForCausalLM": FastDLLMReference,
}

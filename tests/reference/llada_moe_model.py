# SPDX-License-Identifier: Apache-2.0
"""The LLaDA-MoE forward pass as plainly as it can be written.

Source: the public LLaDA-MoE model card and its configuration (arXiv:2509.24389). One batch of
rows of equal length, no padding, one expert at a time. Letters: B rows, T positions, D hidden
size, E experts, I expert width, V logit columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.reference.layers import (
    KeyValues,
    attention,
    check_shapes,
    read_checkpoint,
    rms_norm,
    rotate,
    seen_by_window,
    split_heads,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# What this forward pass implements; any other value would silently give wrong numbers.
SUPPORTED = {
    "hidden_act": "silu",
    "moe_router_score_function": "softmax",
    "shared_expert_intermediate_size": None,
    "attention_bias": False,
}


@dataclass(frozen=True)
class LLaDAMoESettings:
    """The fields of config.json that change the numbers."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    expert_intermediate_size: int
    dense_intermediate_size: int
    moe_layer_freq: tuple[int, ...]
    expert_bias: bool
    qk_layernorm: bool
    clip_qkv: float | None
    partial_rotary_factor: float
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LLaDAMoESettings:
        """Reads a config.json dictionary.

        Raises ValueError for a value that the reference does not implement.
        """
        for name, wanted in SUPPORTED.items():
            if config.get(name, wanted) != wanted:
                raise ValueError(f"{name}: the reference wants {wanted!r}, got {config[name]!r}")
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            num_experts=config["num_experts"],
            num_experts_per_tok=config["num_experts_per_tok"],
            expert_intermediate_size=config["expert_intermediate_size"],
            dense_intermediate_size=config["dense_intermediate_size"],
            moe_layer_freq=tuple(config["moe_layer_freq"]),
            expert_bias=config.get("moe_router_enable_expert_bias", False),
            qk_layernorm=config["qk_layernorm"],
            clip_qkv=config.get("clip_qkv"),
            partial_rotary_factor=config.get("partial_rotary_factor", 1.0),
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_theta"],
            tie_word_embeddings=config.get("tie_word_embeddings", False),
        )


def tensor_shapes(settings: LLaDAMoESettings) -> dict[str, tuple[int, ...]]:
    """Every tensor of an unfused checkpoint with its shape; matrices are stored [out, in]."""
    d, v, head_dim = settings.hidden_size, settings.vocab_size, settings.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}

    def add_mlp(name: str, width: int) -> None:
        shapes[f"{name}.gate_proj.weight"] = (width, d)
        shapes[f"{name}.up_proj.weight"] = (width, d)
        shapes[f"{name}.down_proj.weight"] = (d, width)

    for layer in range(settings.num_layers):
        block = f"model.layers.{layer}"
        shapes[f"{block}.input_layernorm.weight"] = (d,)
        shapes[f"{block}.self_attn.q_proj.weight"] = (settings.num_heads * head_dim, d)
        shapes[f"{block}.self_attn.k_proj.weight"] = (settings.num_kv_heads * head_dim, d)
        shapes[f"{block}.self_attn.v_proj.weight"] = (settings.num_kv_heads * head_dim, d)
        shapes[f"{block}.self_attn.o_proj.weight"] = (d, settings.num_heads * head_dim)
        if settings.qk_layernorm:
            shapes[f"{block}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{block}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{block}.post_attention_layernorm.weight"] = (d,)
        if settings.moe_layer_freq[layer]:
            shapes[f"{block}.mlp.gate.weight"] = (settings.num_experts, d)
            if settings.expert_bias:
                shapes[f"{block}.mlp.expert_bias"] = (settings.num_experts,)
            for expert in range(settings.num_experts):
                add_mlp(f"{block}.mlp.experts.{expert}", settings.expert_intermediate_size)
        else:
            add_mlp(f"{block}.mlp", settings.dense_intermediate_size)
    shapes["model.norm.weight"] = (d,)
    if not settings.tie_word_embeddings:
        shapes["lm_head.weight"] = (v, d)
    return shapes


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


class LLaDAMoEReference:
    """A LLaDA-MoE checkpoint whose logits are computed by plain formulae."""

    logit_shift = 0  # logits at a position predict the token at that position

    def __init__(self, settings: LLaDAMoESettings, weights: Mapping[str, Tensor]) -> None:
        weights = unfuse(weights)
        check_shapes(tensor_shapes(settings), weights)
        self.settings = settings
        self.weights = weights

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, dtype: torch.dtype = torch.float32
    ) -> LLaDAMoEReference:
        """Reads a folder; dtype is the model dtype (float64 keeps every step in float64)."""
        config, weights = read_checkpoint(path, dtype)
        return cls(LLaDAMoESettings.from_config(config), weights)

    def logits(self, ids: Tensor) -> Tensor:
        """Logits [B, T, V], model dtype, of ids int64 [B, T]; no shift."""
        return self.forward_with_kv(ids, range(ids.shape[1]), None)[0]

    @torch.no_grad()
    def forward_with_kv(
        self, ids: Tensor, positions: Sequence[int], past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        """Logits [B, W, V] of a window ids [B, W], and keys and values.

        The window attends to itself and to the rows of `past` at other positions. Returned are
        the rows of `past` overwritten by those of the window.
        """
        settings = self.settings
        embedding = self.weights["model.embed_tokens.weight"]
        x = embedding[ids]
        fresh = []
        for layer in range(settings.num_layers):
            block = f"model.layers.{layer}"
            a, kv = self._attention(layer, x, positions, past)
            fresh.append(kv)
            x = x + a
            gain = self.weights[f"{block}.post_attention_layernorm.weight"]
            h = rms_norm(x, gain, settings.rms_norm_eps)
            if settings.moe_layer_freq[layer]:
                x = x + self.experts(f"{block}.mlp", h)
            else:
                x = x + self._mlp(f"{block}.mlp", h)
        x = rms_norm(x, self.weights["model.norm.weight"], settings.rms_norm_eps)
        head = embedding if settings.tie_word_embeddings else self.weights["lm_head.weight"]
        window = KeyValues(tuple(positions), tuple(fresh))
        return functional.linear(x, head), window if past is None else past.overwrite(window)

    def route(self, mlp: str, h: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [B, T, k] and weights [B, T, k] (model dtype) of hidden states h [B, T, D].

        Probabilities over all experts in fp32; the weights are those of the chosen experts as
        they are, not made to sum to 1. A bias takes part in the choice only. Ties: lowest id.
        """
        scores = functional.linear(h, self.weights[f"{mlp}.gate.weight"])
        wide = torch.promote_types(h.dtype, torch.float32)
        probabilities = torch.softmax(scores.to(wide), dim=-1)
        choice = probabilities
        if self.settings.expert_bias:
            choice = probabilities + self.weights[f"{mlp}.expert_bias"].to(wide)
        order = torch.sort(choice, dim=-1, descending=True, stable=True).indices
        chosen = order[..., : self.settings.num_experts_per_tok]
        return chosen, probabilities.gather(-1, chosen).to(h.dtype)

    def experts(self, mlp: str, h: Tensor) -> Tensor:
        """The mixture [B, T, D], summed in the model dtype in ascending order of expert."""
        chosen, weights = self.route(mlp, h)
        total = torch.zeros_like(h)
        for expert in range(self.settings.num_experts):
            is_chosen = chosen == expert  # [B, T, k]
            weight = (weights * is_chosen).sum(dim=-1)  # one of the k at most
            reached = is_chosen.any(dim=-1)
            output = self._mlp(f"{mlp}.experts.{expert}", h[reached])
            total[reached] += output * weight[reached][:, None]
        return total

    def _attention(
        self, layer: int, x: Tensor, positions: Sequence[int], past: KeyValues | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        settings, block = self.settings, f"model.layers.{layer}"
        h = rms_norm(x, self.weights[f"{block}.input_layernorm.weight"], settings.rms_norm_eps)
        heads = []
        for part in "qkv":
            y = functional.linear(h, self.weights[f"{block}.self_attn.{part}_proj.weight"])
            if settings.clip_qkv is not None:
                y = y.clamp(-settings.clip_qkv, settings.clip_qkv)
            y = split_heads(y, settings.head_dim)
            if settings.qk_layernorm and part != "v":  # of each head alone
                gain = self.weights[f"{block}.self_attn.{part}_norm.weight"]
                y = rms_norm(y, gain, settings.rms_norm_eps)
            heads.append(y if part == "v" else self._rotate(y, positions))
        q, k, v = heads
        a = attention(q, *seen_by_window(past, layer, positions, k, v)).transpose(1, 2).flatten(2)
        return functional.linear(a, self.weights[f"{block}.self_attn.o_proj.weight"]), (k, v)

    def _rotate(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        rotary_dim = int(x.shape[-1] * self.settings.partial_rotary_factor)
        turned = rotate(x[..., :rotary_dim], self.settings.rope_theta, False, positions)
        return torch.cat([turned, x[..., rotary_dim:]], dim=-1)

    def _mlp(self, name: str, h: Tensor) -> Tensor:
        gate = functional.silu(functional.linear(h, self.weights[f"{name}.gate_proj.weight"]))
        up = functional.linear(h, self.weights[f"{name}.up_proj.weight"])
        return functional.linear(gate * up, self.weights[f"{name}.down_proj.weight"])

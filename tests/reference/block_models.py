# SPDX-License-Identifier: Apache-2.0
"""Forward passes under a block-causal mask, as plainly as they can be written.

A position sees its own block and the blocks before it; blocks lie on a grid from position 0. One
batch of rows of equal length, no padding, no kept keys: the whole sequence every time.

Sources: the public configurations and tensor names of SDAR (arXiv:2510.06303) and Fast-dLLM v2
(arXiv:2509.26328). Letters: B rows, T positions, D hidden size, H heads, hd head width, V logit
columns.
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
        return cls(*read_checkpoint(path, dtype))

    @classmethod
    def tensor_shapes(cls, config: Config) -> Shapes:
        """Every tensor of a checkpoint with its shape; matrices are stored [out, in]."""
        d, v = config["hidden_size"], config["vocab_size"]
        shapes: Shapes = {"model.embed_tokens.weight": (v, d)}
        for layer in range(config["num_hidden_layers"]):
            block = f"model.layers.{layer}"
            shapes[f"{block}.input_layernorm.weight"] = (d,)
            shapes |= cls.attention_shapes(config, f"{block}.self_attn")
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
        embedding = self.weights["model.embed_tokens.weight"]
        sees = block_causal(ids.shape[1], block_length)
        x = embedding[ids]
        for layer in range(self.config["num_hidden_layers"]):
            block = f"model.layers.{layer}"
            h = rms_norm(x, self.weights[f"{block}.input_layernorm.weight"], eps)
            x = x + self.attention(f"{block}.self_attn", h, sees)
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


def head_width(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def gated_shapes(path: str, width: int, inner: int) -> Shapes:
    return {
        f"{path}.gate_proj.weight": (inner, width),
        f"{path}.up_proj.weight": (inner, width),
        f"{path}.down_proj.weight": (width, inner),
    }


REFERENCES: dict[str, type[SDARReference]] = {
    "SDARForCausalLM": SDARReference,
    "Fast_dLLM_QwenForCausalLM": FastDLLMReference,
}

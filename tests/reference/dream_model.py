# SPDX-License-Identifier: Apache-2.0
"""The Dream forward pass, and DiffuLLaMA's, as plainly as they can be written.

Source: the public Dream repository and model card (Dream 7B, arXiv:2508.15487): Qwen2 layers,
with biases on q, k and v, whose causal mask is removed. One batch of rows of equal length, no
padding. DiffuLLaMA (arXiv:2410.17891) has Llama's layers, which are the same without biases, and
the same shift. Letters: B rows, T positions, D hidden size, V logit columns.
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
SUPPORTED = {"hidden_act": "silu", "rope_scaling": None, "use_sliding_window": False}


@dataclass(frozen=True)
class DreamSettings:
    """The fields of config.json that change the numbers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qkv_bias: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DreamSettings:
        """Reads a config.json dictionary.

        Raises ValueError for a value that the reference does not implement.
        """
        for name, wanted in SUPPORTED.items():
            if config.get(name, wanted) != wanted:
                raise ValueError(f"{name}: the reference wants {wanted!r}, got {config[name]!r}")
        num_heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=config.get("rope_theta", 10000.0),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            qkv_bias=config["model_type"] != "llama",
        )


def tensor_shapes(settings: DreamSettings) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with its shape; matrices are stored [out, in]."""
    d, m, v = settings.hidden_size, settings.intermediate_size, settings.vocab_size
    q, kv = (n * settings.head_dim for n in (settings.num_heads, settings.num_kv_heads))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for layer in range(settings.num_layers):
        block = f"model.layers.{layer}"
        shapes[f"{block}.input_layernorm.weight"] = (d,)
        for part, num_out in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{block}.self_attn.{part}_proj.weight"] = (num_out, d)
            if settings.qkv_bias:
                shapes[f"{block}.self_attn.{part}_proj.bias"] = (num_out,)
        shapes[f"{block}.self_attn.o_proj.weight"] = (d, q)
        shapes[f"{block}.post_attention_layernorm.weight"] = (d,)
        shapes[f"{block}.mlp.gate_proj.weight"] = (m, d)
        shapes[f"{block}.mlp.up_proj.weight"] = (m, d)
        shapes[f"{block}.mlp.down_proj.weight"] = (d, m)
    shapes["model.norm.weight"] = (d,)
    if not settings.tie_word_embeddings:
        shapes["lm_head.weight"] = (v, d)
    return shapes


class DreamReference:
    """A Dream checkpoint whose logits are computed by plain formulae.

    The logits are raw: those at position i predict the token at position i + 1.
    """

    logit_shift = 1

    def __init__(self, settings: DreamSettings, weights: Mapping[str, Tensor]) -> None:
        check_shapes(tensor_shapes(settings), weights)
        self.settings = settings
        self.weights = dict(weights)

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, dtype: torch.dtype = torch.float32
    ) -> DreamReference:
        """Reads a folder; dtype is the model dtype (float64 keeps every step in float64)."""
        config, weights = read_checkpoint(path, dtype)
        return cls(DreamSettings.from_config(config), weights)

    def logits(self, ids: Tensor) -> Tensor:
        """Raw logits [B, T, V], model dtype, of ids int64 [B, T]; see `layers.shift_right`."""
        return self.forward_with_kv(ids, range(ids.shape[1]), None)[0]

    @torch.no_grad()
    def forward_with_kv(
        self, ids: Tensor, positions: Sequence[int], past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        """Raw logits [B, W, V] of a window ids [B, W], and keys and values.

        The window attends to itself and to the rows of `past` at other positions. Returned are
        the rows of `past` overwritten by those of the window.
        """
        settings = self.settings
        embedding = self.weights["model.embed_tokens.weight"]
        x = embedding[ids]
        fresh = []
        for layer in range(settings.num_layers):
            x, kv = self._layer(layer, x, positions, past)
            fresh.append(kv)
        x = rms_norm(x, self.weights["model.norm.weight"], settings.rms_norm_eps)
        head = embedding if settings.tie_word_embeddings else self.weights["lm_head.weight"]
        window = KeyValues(tuple(positions), tuple(fresh))
        return functional.linear(x, head), window if past is None else past.overwrite(window)

    def _layer(
        self, layer: int, x: Tensor, positions: Sequence[int], past: KeyValues | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One transformer block on the residual stream x [B, W, D]; also its keys and values."""
        settings, block = self.settings, f"model.layers.{layer}"
        eps, theta = settings.rms_norm_eps, settings.rope_theta

        h = rms_norm(x, self.weights[f"{block}.input_layernorm.weight"], eps)
        q, k, v = (
            split_heads(self._linear(f"{block}.self_attn.{part}_proj", h), settings.head_dim)
            for part in "qkv"
        )
        q = rotate(q, theta, False, positions)
        k = rotate(k, theta, False, positions)
        a = attention(q, *seen_by_window(past, layer, positions, k, v))
        x = x + self._linear(f"{block}.self_attn.o_proj", a.transpose(1, 2).flatten(2))

        h = rms_norm(x, self.weights[f"{block}.post_attention_layernorm.weight"], eps)
        gate = functional.silu(self._linear(f"{block}.mlp.gate_proj", h))
        up = self._linear(f"{block}.mlp.up_proj", h)
        return x + self._linear(f"{block}.mlp.down_proj", gate * up), (k, v)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(
            x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )

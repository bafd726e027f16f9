# SPDX-License-Identifier: Apache-2.0
"""The LLaDA forward pass as plainly as it can be written.

Sources: the LLaDA paper (arXiv:2502.09992) and the public model card with its configuration.
One batch of rows of equal length, no padding, no parallel layers. Letters: B rows,
T positions, D hidden size, H heads, K key/value heads, hd = D / H, M MLP width, V logit columns.
"""

from __future__ import annotations

import math
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

ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "max_position_embeddings": "max_sequence_length",
    "tie_word_embeddings": "weight_tying",
}

# What this forward pass implements; any other value would silently give wrong numbers.
SUPPORTED = {
    "block_type": "llama",
    "activation_type": "silu",
    "layer_norm_type": "rms",
    "rope": True,
    "alibi": False,
    "bias_for_layer_norm": False,
    "layer_norm_with_affine": True,
    "attention_layer_norm_with_affine": True,
}


@dataclass(frozen=True)
class LLaDASettings:
    """The fields of config.json that change the numbers."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    n_layers: int
    mlp_hidden_size: int
    embedding_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_full_precision: bool
    attention_layer_norm: bool
    include_bias: bool
    include_qkv_bias: bool
    input_emb_norm: bool
    scale_logits: bool
    weight_tying: bool
    block_group_size: int

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LLaDASettings:
        """Reads a config.json dictionary.

        Raises ValueError for a value that the reference does not implement.
        """
        values = dict(config)
        for alias, name in ALIASES.items():
            if alias in values:
                values.setdefault(name, values[alias])
        for name, wanted in SUPPORTED.items():
            if values.get(name, wanted) != wanted:
                raise ValueError(f"{name}: the reference wants {wanted!r}, got {values[name]!r}")

        n_kv_heads = values.get("n_kv_heads")
        if n_kv_heads is None:
            n_kv_heads = 1 if values.get("multi_query_attention") else values["n_heads"]
        mlp_hidden_size = values.get("mlp_hidden_size")
        if mlp_hidden_size is None:
            mlp_hidden_size = values["mlp_ratio"] * values["d_model"]
        return cls(
            d_model=values["d_model"],
            n_heads=values["n_heads"],
            n_kv_heads=n_kv_heads,
            n_layers=values["n_layers"],
            mlp_hidden_size=mlp_hidden_size,
            embedding_size=values.get("embedding_size") or values["vocab_size"],
            rms_norm_eps=values.get("rms_norm_eps", 1e-5),
            rope_theta=values["rope_theta"],
            rope_full_precision=values.get("rope_full_precision", True),
            attention_layer_norm=values.get("attention_layer_norm", False),
            include_bias=values.get("include_bias", False),
            include_qkv_bias=values.get("include_qkv_bias", False),
            input_emb_norm=values.get("input_emb_norm", False),
            scale_logits=values.get("scale_logits", False),
            weight_tying=values["weight_tying"],
            block_group_size=values.get("block_group_size", 1),
        )


def block_prefix(settings: LLaDASettings, layer: int) -> str:
    """The tensor name prefix of a layer: plain, or by groups when block_group_size > 1."""
    size = settings.block_group_size
    if size == 1:
        return f"model.transformer.blocks.{layer}"
    return f"model.transformer.block_groups.{layer // size}.{layer % size}"


def tensor_shapes(settings: LLaDASettings) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint with its shape; matrices are stored [out, in]."""
    d, m, v = settings.d_model, settings.mlp_hidden_size, settings.embedding_size
    kv = settings.n_kv_heads * settings.head_dim
    qkv_bias = settings.include_bias or settings.include_qkv_bias
    shapes: dict[str, tuple[int, ...]] = {}

    def add_linear(name: str, num_out: int, num_in: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            shapes[f"{name}.bias"] = (num_out,)

    shapes["model.transformer.wte.weight"] = (v, d)
    for layer in range(settings.n_layers):
        block = block_prefix(settings, layer)
        shapes[f"{block}.attn_norm.weight"] = (d,)
        add_linear(f"{block}.q_proj", d, d, qkv_bias)
        add_linear(f"{block}.k_proj", kv, d, qkv_bias)
        add_linear(f"{block}.v_proj", kv, d, qkv_bias)
        if settings.attention_layer_norm:
            shapes[f"{block}.q_norm.weight"] = (d,)
            shapes[f"{block}.k_norm.weight"] = (kv,)
        add_linear(f"{block}.attn_out", d, d, settings.include_bias)
        shapes[f"{block}.ff_norm.weight"] = (d,)
        add_linear(f"{block}.ff_proj", m, d, settings.include_bias)
        add_linear(f"{block}.up_proj", m, d, settings.include_bias)
        add_linear(f"{block}.ff_out", d, m, settings.include_bias)
    shapes["model.transformer.ln_f.weight"] = (d,)
    if not settings.weight_tying:
        add_linear("model.transformer.ff_out", v, d, settings.include_bias)
    return shapes


class LLaDAReference:
    """A LLaDA checkpoint whose logits are computed by plain formulae."""

    logit_shift = 0  # logits at a position predict the token at that position

    def __init__(self, settings: LLaDASettings, weights: Mapping[str, Tensor]) -> None:
        check_shapes(tensor_shapes(settings), weights)
        self.settings = settings
        self.weights = dict(weights)

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, dtype: torch.dtype = torch.float32
    ) -> LLaDAReference:
        """Reads config.json and the safetensors of a folder (shards with index, or one file).

        dtype is the model dtype. float64 keeps every step in float64, also those that the
        released model does in fp32.
        """
        config, weights = read_checkpoint(path, dtype)
        return cls(LLaDASettings.from_config(config), weights)

    def logits(self, ids: Tensor) -> Tensor:
        """Logits [B, T, embedding_size], model dtype, of ids int64 [B, T]; no shift."""
        return self.forward_with_kv(ids, range(ids.shape[1]), None)[0]

    @torch.no_grad()
    def forward_with_kv(
        self, ids: Tensor, positions: Sequence[int], past: KeyValues | None
    ) -> tuple[Tensor, KeyValues]:
        """Logits [B, W, embedding_size] of a window ids [B, W], and keys and values.

        The window attends to itself and to the rows of `past` at other positions. Returned are
        the rows of `past` overwritten by those of the window.
        """
        settings = self.settings
        x = self.weights["model.transformer.wte.weight"][ids]
        if settings.input_emb_norm:
            x = x * settings.d_model**0.5
        fresh = []
        for layer in range(settings.n_layers):
            x, kv = self.layer(layer, x, positions, past)
            fresh.append(kv)
        x = rms_norm(x, self.weights["model.transformer.ln_f.weight"], settings.rms_norm_eps)
        if settings.weight_tying:
            logits = functional.linear(x, self.weights["model.transformer.wte.weight"])
        else:
            logits = self._linear("model.transformer.ff_out", x)
        if settings.scale_logits:
            logits = logits * (1.0 / math.sqrt(settings.d_model))
        window = KeyValues(tuple(positions), tuple(fresh))
        return logits, window if past is None else past.overwrite(window)

    def layer(
        self, layer: int, x: Tensor, positions: Sequence[int], past: KeyValues | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One transformer block on the residual stream x [B, W, D]; also its keys and values."""
        settings, block = self.settings, block_prefix(self.settings, layer)
        eps, head_dim = settings.rms_norm_eps, settings.head_dim

        h = rms_norm(x, self.weights[f"{block}.attn_norm.weight"], eps)
        q = self._linear(f"{block}.q_proj", h)
        k = self._linear(f"{block}.k_proj", h)
        v = self._linear(f"{block}.v_proj", h)
        if settings.attention_layer_norm:  # over all heads at once, before the split
            q = rms_norm(q, self.weights[f"{block}.q_norm.weight"], eps)
            k = rms_norm(k, self.weights[f"{block}.k_norm.weight"], eps)
        q, k, v = (split_heads(y, head_dim) for y in (q, k, v))
        q = rotate(q, settings.rope_theta, settings.rope_full_precision, positions)
        k = rotate(k, settings.rope_theta, settings.rope_full_precision, positions)
        a = attention(q, *seen_by_window(past, layer, positions, k, v))
        x = x + self._linear(f"{block}.attn_out", a.transpose(1, 2).flatten(2))

        h = rms_norm(x, self.weights[f"{block}.ff_norm.weight"], eps)
        gate = functional.silu(self._linear(f"{block}.ff_proj", h))
        up = self._linear(f"{block}.up_proj", h)
        return x + self._linear(f"{block}.ff_out", gate * up), (k, v)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}.bias")  # present exactly when the config says so
        return functional.linear(x, self.weights[f"{name}.weight"], bias)

# SPDX-License-Identifier: Apache-2.0
"""The forward pass of Llama's layers without a causal mask, as plainly as it can be written.

One batch of rows of equal length, no padding, no parallel layers. A family is a class below this
one, in a file with its sources. Letters: B rows, T positions, D hidden size, H heads, hd head
width, V logit columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
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
    from typing import Self

    from torch import Tensor

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}


def block_causal(num_positions: int, block_length: int) -> Tensor:
    """[T, T] bool: whether the position of the row sees that of the column."""
    block = torch.arange(num_positions) // block_length
    return block[None, :] <= block[:, None]


class LlamaReference:
    """A checkpoint whose logits are computed by plain formulae.

    Attributes:
        logit_shift: logits at position i predict the token at i + logit_shift.
        supported: what the forward pass implements; any other value would silently give wrong
            numbers.
        embedding, attention_name: what tensors are called.
        norms_heads: queries and keys of each head are normed.
        wide: tensors whose names end so stay at least fp32.
    """

    logit_shift: ClassVar[int] = 0
    supported: ClassVar[Config] = {}
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    attention_name: ClassVar[str] = "self_attn"
    norms_heads: ClassVar[bool] = False
    wide: ClassVar[str] = "none are"

    def __init__(self, config: Config, weights: Mapping[str, Tensor]) -> None:
        """Raises ValueError for a configuration that is not implemented, or does not fit."""
        for name, wanted in self.supported.items():
            if config.get(name, wanted) != wanted:
                raise ValueError(f"{name}: the reference wants {wanted!r}, got {config[name]!r}")
        check_shapes(self.tensor_shapes(config), weights)
        self.config = DEFAULTS | config
        self.weights = dict(weights)
        self.head_dim = head_width(config)
        self.embedding_scale = self.logits_scale = 1.0
        self.rotates_in_fp32 = False

    @classmethod
    def from_checkpoint(cls, path: str | Path, dtype: torch.dtype = torch.float32) -> Self:
        """Reads a folder; dtype is the model dtype (float64 keeps every step in float64)."""
        return cls(*read_checkpoint(path, dtype, wide=cls.wide))

    @classmethod
    def has_qkv_bias(cls, config: Config) -> bool:
        return False

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
        if not config.get("tie_word_embeddings"):
            shapes["lm_head.weight"] = (v, d)
        return shapes

    @classmethod
    def attention_shapes(cls, config: Config, path: str) -> Shapes:
        d, hd, heads = config["hidden_size"], head_width(config), config["num_attention_heads"]
        q, kv = heads * hd, (config.get("num_key_value_heads") or heads) * hd
        shapes: Shapes = {}
        for part, num_out in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{path}.{part}_proj.weight"] = (num_out, d)
            if cls.has_qkv_bias(config):
                shapes[f"{path}.{part}_proj.bias"] = (num_out,)
        if cls.norms_heads:
            shapes |= {f"{path}.q_norm.weight": (hd,), f"{path}.k_norm.weight": (hd,)}
        return {**shapes, f"{path}.o_proj.weight": (d, q)}

    @classmethod
    def mlp_shapes(cls, config: Config, layer: int) -> Shapes:
        width, inner = config["hidden_size"], config["intermediate_size"]
        return gated_shapes(f"model.layers.{layer}.mlp", width, inner)

    def logits(self, ids: Tensor, block_length: int | None = None) -> Tensor:
        """Raw logits [B, T, V], model dtype, of ids int64 [B, T]; see `layers.shift_right`.

        With a `block_length` a position sees its own block and the blocks before it.
        """
        num_positions = ids.shape[1]
        sees = None if block_length is None else block_causal(num_positions, block_length)
        return self.forward_with_kv(ids, range(num_positions), None, sees)[0]

    @torch.no_grad()
    def forward_with_kv(
        self,
        ids: Tensor,
        positions: Sequence[int],
        past: KeyValues | None,
        sees: Tensor | None = None,
    ) -> tuple[Tensor, KeyValues]:
        """Raw logits [B, W, V] of a window ids [B, W], and keys and values.

        The window attends to itself and to the rows of `past` at other positions, or to those that
        it `sees` [W, W]. Returned are the rows of `past` overwritten by those of the window.
        """
        embedding, fresh = self.weights[self.embedding], []
        x = embedding[ids] * self.embedding_scale
        for layer in range(self.config["num_hidden_layers"]):
            block = f"model.layers.{layer}"
            h = self.normed(f"{block}.input_layernorm", x)
            q, k, v = self.heads(f"{block}.{self.attention_name}", h, positions)
            a = attention(q, *seen_by_window(past, layer, positions, k, v), sees)
            x = x + self.joined(f"{block}.{self.attention_name}", a.transpose(1, 2).flatten(2))
            h = self.normed(f"{block}.post_attention_layernorm", x)
            x = x + self.mlp(layer, h)
            fresh.append((k, v))
        x = self.normed("model.norm", x)
        is_tied = self.config["tie_word_embeddings"]
        logits = functional.linear(x, embedding) if is_tied else self.linear("lm_head", x)
        logits = logits * self.logits_scale
        window = KeyValues(tuple(positions), tuple(fresh))
        return logits, window if past is None else past.overwrite(window)

    def heads(
        self, path: str, h: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, hd], keys and values of normed rows h [B, T, D]."""
        q, k, v = (split_heads(self.linear(f"{path}.{p}_proj", h), self.head_dim) for p in "qkv")
        if self.norms_heads:
            q, k = self.normed(f"{path}.q_norm", q), self.normed(f"{path}.k_norm", k)
        return self.rotated(q, positions), self.rotated(k, positions), v

    def joined(self, path: str, a: Tensor) -> Tensor:
        """The output projection of what all heads have attended to, [B, T, H hd]."""
        return self.linear(f"{path}.o_proj", a)

    def mlp(self, layer: int, h: Tensor) -> Tensor:
        """The feed-forward of normed rows h [B, T, D]."""
        return self.gated(f"model.layers.{layer}.mlp", h)

    def gated(self, path: str, h: Tensor) -> Tensor:
        gate = functional.silu(self.linear(f"{path}.gate_proj", h))
        return self.linear(f"{path}.down_proj", gate * self.linear(f"{path}.up_proj", h))

    def linear(self, name: str, x: Tensor) -> Tensor:
        name = self.stored(name)
        return functional.linear(
            x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        )

    def normed(self, name: str, x: Tensor) -> Tensor:
        gain = self.weights[f"{self.stored(name)}.weight"]
        return rms_norm(x, gain, self.config["rms_norm_eps"])

    def stored(self, name: str) -> str:
        """What the checkpoint calls a module of Llama's."""
        return name

    def rotated(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """The first channels of each head [B, H, T, hd] turned, all of them unless said."""
        turned = int(self.head_dim * self.config.get("partial_rotary_factor", 1.0))
        theta, in_fp32 = self.config["rope_theta"], self.rotates_in_fp32
        first = rotate(x[..., :turned], theta, in_fp32, positions)
        return torch.cat([first, x[..., turned:]], dim=-1)


def head_width(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def gated_shapes(path: str, width: int, inner: int) -> Shapes:
    return {
        f"{path}.gate_proj.weight": (inner, width),
        f"{path}.up_proj.weight": (inner, width),
        f"{path}.down_proj.weight": (width, inner),
    }


def experts_shapes(mlp: str, config: Config, inner: int) -> Shapes:
    """The router and the experts of a layer."""
    width = config["hidden_size"]
    shapes: Shapes = {f"{mlp}.gate.weight": (config["num_experts"], width)}
    for expert in range(config["num_experts"]):
        shapes |= gated_shapes(f"{mlp}.experts.{expert}", width, inner)
    return shapes

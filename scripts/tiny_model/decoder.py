# SPDX-License-Identifier: Apache-2.0
"""The transformer of the families whose checkpoints carry Hugging Face's usual tensor names.

A pre-norm transformer with grouped-query attention, rotary positions and RMSNorm; what a family
adds (biases, norms of query and key, experts, blocks, the shift of rows) is given by its
configuration and its own module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny_model.layers import (
    View,
    attend,
    block_causal,
    embedding_rows,
    initialise,
    noised_behind_clean,
    rotary_tables,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiny_model.family import TokenIds


def qwen_config(tokens: TokenIds, **own: Any) -> dict[str, Any]:
    """The keys of config.json that children of Qwen share, at tiny size and in fp32, and `own`."""
    return {
        "attention_dropout": 0.0,
        "bos_token_id": tokens.eos,  # as released: not the tokenizer's begin-of-text
        "eos_token_id": tokens.eos,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "max_window_layers": 4,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": embedding_rows(tokens.vocab_size),
        **own,
    }


class Attention(nn.Module):
    """Query head h uses key and value head h // (heads / kv heads)."""

    def __init__(self, config: dict[str, Any], *, qkv_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        width, num_heads = config["hidden_size"], config["num_attention_heads"]
        self.head_dim = config.get("head_dim", width // num_heads)
        q_width = num_heads * self.head_dim
        kv_width = config["num_key_value_heads"] * self.head_dim
        self.q_proj = nn.Linear(width, q_width, bias=qkv_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(q_width, width, bias=False)
        if qk_norm:  # over each head, before the rotation
            self.q_norm = nn.RMSNorm(self.head_dim, config["rms_norm_eps"])
            self.k_norm = nn.RMSNorm(self.head_dim, config["rms_norm_eps"])
        self.qk_norm = qk_norm

    def forward(self, x: Tensor, view: View) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return cast("Tensor", self.o_proj(attend(q, k, v, view)))


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_width, bias=False)
        self.up_proj = nn.Linear(width, inner_width, bias=False)
        self.down_proj = nn.Linear(inner_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """One transformer layer; attribute names are the checkpoint's tensor names."""

    def __init__(self, config: dict[str, Any], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = mlp

    @property
    def value_and_output(self) -> tuple[Tensor, Tensor]:
        """Matrices of the values [kv heads * hd, D] and behind the attention [D, heads * hd]."""
        return self.self_attn.v_proj.weight, self.self_attn.o_proj.weight

    def forward(self, x: Tensor, view: View) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), view)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """The whole network with random weights; see family.Network.

    Args:
        make_layer: builds layer number i, called with rows and their `View`, which names its
            `value_and_output`.
        shift_rows: position i is read from row i - 1, and position 0 from row 0.
        block_length: see family.Network.
        rotary_dim: rotated channels of a head; None: all.
        embedding_name: of the embedding's matrix in the checkpoint.
    """

    def __init__(
        self,
        config: dict[str, Any],
        make_layer: Callable[[int], nn.Module],
        *,
        shift_rows: bool = False,
        block_length: int = 0,
        rotary_dim: int | None = None,
        embedding_name: str = "embed_tokens",
    ) -> None:
        super().__init__()
        width, rows = config["hidden_size"], config["vocab_size"]
        head_dim = config.get("head_dim", width // config["num_attention_heads"])
        self.rotary_dim = rotary_dim or head_dim
        self.rope_theta = config["rope_theta"]
        self.shift_rows = shift_rows
        self.block_length = block_length
        self.embedding_name = embedding_name
        self.model = nn.ModuleDict(
            {
                embedding_name: nn.Embedding(rows, width),
                "layers": nn.ModuleList(map(make_layer, range(config["num_hidden_layers"]))),
                "norm": nn.RMSNorm(width, config["rms_norm_eps"]),
            }
        )
        self.lm_head = nn.Linear(width, rows, bias=False)
        attentions = (layer.value_and_output for layer in self.model["layers"])
        initialise(self, self.model[embedding_name], self.lm_head, attentions, head_dim)

    def hidden(self, ids: Tensor, clean: Tensor | None = None) -> Tensor:
        """ids [B, T] int64 -> final normed hidden states [B, T, D] fp32, row i of token i."""
        length, is_doubled = ids.shape[-1], bool(self.block_length) and clean is not None
        if is_doubled:
            ids = torch.cat((cast("Tensor", clean), ids), dim=-1)
        x: Tensor = self.model[self.embedding_name](ids)
        tables = rotary_tables(length, self.rotary_dim, self.rope_theta, x.device)
        cos, sin = (table.to(x.dtype) for table in tables)
        view = View(cos, sin, None)
        if is_doubled:
            sees = noised_behind_clean(length, self.block_length)
            view = View(torch.cat((cos, cos)), torch.cat((sin, sin)), sees.to(x.device))
        elif self.block_length:
            view = View(cos, sin, block_causal(length, self.block_length).to(x.device))
        for layer in cast("nn.ModuleList", self.model["layers"]):
            x = layer(x, view)
        rows = torch.arange(x.shape[1] - length, x.shape[1])
        if self.shift_rows:
            rows = self._rows_before(length, is_doubled)
        return cast("Tensor", self.model["norm"](x[:, rows]))

    def _rows_before(self, length: int, is_doubled: bool) -> Tensor:
        """The row that each position is read from: a block's first from the finished one before."""
        position = torch.arange(length)
        before = (position - 1).clamp(min=0)
        if is_doubled:
            before += length * (position % self.block_length != 0)
        return before

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., rows of the embedding] fp32."""
        return cast("Tensor", self.lm_head(hidden))


def dense_network(
    config: dict[str, Any],
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    shift_rows: bool = False,
    block_length: int = 0,
) -> Decoder:
    """A network without experts, with random weights; see Attention and Decoder."""

    def make_layer(_: int) -> Layer:
        attention = Attention(config, qkv_bias=qkv_bias, qk_norm=qk_norm)
        mlp = GatedMLP(config["hidden_size"], config["intermediate_size"])
        return Layer(config, attention, mlp)

    return Decoder(config, make_layer, shift_rows=shift_rows, block_length=block_length)

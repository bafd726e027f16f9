# SPDX-License-Identifier: Apache-2.0
"""The transformer of the families whose checkpoints carry Hugging Face's usual tensor names.

A pre-norm transformer with bidirectional grouped-query attention, rotary positions and RMSNorm;
what a family adds (biases, norms of query and key, experts, the shift of rows) is given by its
configuration and its own module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from tiny_model.layers import initialise, rotary_tables, rotate

if TYPE_CHECKING:
    from collections.abc import Callable


class Attention(nn.Module):
    """Bidirectional attention; query head h uses key and value head h // (heads / kv heads)."""

    def __init__(self, config: dict[str, Any], *, qkv_bias: bool, qk_norm: bool) -> None:
        super().__init__()
        width = config["hidden_size"]
        self.head_dim = width // config["num_attention_heads"]
        kv_width = config["num_key_value_heads"] * self.head_dim
        self.q_proj = nn.Linear(width, width, bias=qkv_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(width, width, bias=False)
        if qk_norm:  # over each head, before the rotation
            self.q_norm = nn.RMSNorm(self.head_dim, config["rms_norm_eps"])
            self.k_norm = nn.RMSNorm(self.head_dim, config["rms_norm_eps"])
        self.qk_norm = qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D], cos and sin [T, hd] -> [B, T, D]."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, enable_gqa=True
        )
        return cast("Tensor", self.o_proj(attended.transpose(1, 2).flatten(-2)))


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D], cos and sin [T, hd] -> [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """The whole network with random weights.

    `make_layer` builds layer number i; `shift_rows` says that position i is read from row i - 1,
    and position 0 from row 0.
    """

    def __init__(
        self, config: dict[str, Any], make_layer: Callable[[int], Layer], *, shift_rows: bool
    ) -> None:
        super().__init__()
        width, rows = config["hidden_size"], config["vocab_size"]
        self.head_dim = width // config["num_attention_heads"]
        self.rope_theta = config["rope_theta"]
        self.shift_rows = shift_rows
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(rows, width),
                "layers": nn.ModuleList(map(make_layer, range(config["num_hidden_layers"]))),
                "norm": nn.RMSNorm(width, config["rms_norm_eps"]),
            }
        )
        self.lm_head = nn.Linear(width, rows, bias=False)
        initialise(self)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, T] int64 -> final normed hidden states [B, T, D] fp32, row i of token i."""
        cos, sin = rotary_tables(ids.shape[-1], self.head_dim, self.rope_theta)
        x: Tensor = self.model["embed_tokens"](ids)
        for layer in cast("nn.ModuleList", self.model["layers"]):
            x = layer(x, cos, sin)
        if self.shift_rows:
            x = x[:, [0, *range(ids.shape[-1] - 1)]]
        return cast("Tensor", self.model["norm"](x))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., rows of the embedding] fp32."""
        return cast("Tensor", self.lm_head(hidden))

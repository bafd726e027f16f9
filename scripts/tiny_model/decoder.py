# SPDX-License-Identifier: Apache-2.0
"""The transformer of the families whose checkpoints have Hugging Face's usual tensor names.

It is a pre-norm transformer with grouped-query attention, rotary positions and RMSNorm. A family's
configuration and its own module add the rest: biases, norms of query and key, experts, blocks, the
shift of rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

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
    wide,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiny_model.family import TokenIds


def qwen_config(tokens: TokenIds, **own: Any) -> dict[str, Any]:
    """Return the keys of config.json that children of Qwen share, plus `own`.

    Sizes are tiny, and the dtype is fp32.
    """
    return {
        "attention_dropout": 0.0,
        "bos_token_id": tokens.eos,  # the released value, not the tokenizer's begin-of-text token
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


def head_width(config: dict[str, Any]) -> int:
    """Return the number of channels of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


class Attention(nn.Module):
    """Grouped-query attention: query head h uses key and value head h // (heads / kv heads).

    Args:
        qk_norm: norms of query and key before the rotation, over each "head" or "all" of them.
        clip: largest magnitude of an element of query, key and value; None: no limit.
    """

    def __init__(
        self,
        config: dict[str, Any],
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: Literal["", "head", "all"] = "",
        clip: float | None = None,
    ) -> None:
        super().__init__()
        width, num_heads = config["hidden_size"], config["num_attention_heads"]
        self.head_dim, self.qk_norm, self.clip = head_width(config), qk_norm, clip
        q_width = num_heads * self.head_dim
        kv_width = (config.get("num_key_value_heads") or num_heads) * self.head_dim
        self.q_proj = nn.Linear(width, q_width, bias=qkv_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=qkv_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=qkv_bias)
        self.o_proj = nn.Linear(q_width, width, bias=out_bias)
        if qk_norm:
            widths = (q_width, kv_width) if qk_norm == "all" else (self.head_dim,) * 2
            self.q_norm, self.k_norm = (nn.RMSNorm(w, config["rms_norm_eps"]) for w in widths)

    def forward(self, x: Tensor, view: View) -> Tensor:
        """Map x [B, T, D] to [B, T, D]."""
        q, k, v = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.clip is not None:
            q, k, v = (y.clamp(-self.clip, self.clip) for y in (q, k, v))
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return cast("Tensor", self.o_proj(attend(q, k, v, view)))


class GatedMLP(nn.Module):
    """Feed-forward: down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner_width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_width, bias=bias)
        self.up_proj = nn.Linear(width, inner_width, bias=bias)
        self.down_proj = nn.Linear(inner_width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., D] to [..., D]."""
        return cast("Tensor", self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class MixtureOfExperts(nn.Module):
    """The sum of the top experts, each times its share of a softmax over all experts.

    Args:
        makes_up_one: whether the shares of the chosen experts are scaled to sum to 1.
        has_bias: whether there is a bias that is not trained and affects only the choice.
    """

    def __init__(
        self,
        config: dict[str, Any],
        inner_width: int,
        *,
        makes_up_one: bool = False,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        width, num_experts = config["hidden_size"], config["num_experts"]
        self.num_chosen, self.makes_up_one = config["num_experts_per_tok"], makes_up_one
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.register_buffer("expert_bias", torch.zeros(num_experts) if has_bias else None)
        self.experts = nn.ModuleList(GatedMLP(width, inner_width) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, D] to [B, T, D]."""
        rows = x.flatten(0, -2)
        shares = self.gate(rows).to(wide(x.dtype)).softmax(dim=-1)
        ranks = shares if self.expert_bias is None else shares + self.expert_bias.to(shares.dtype)
        chosen = ranks.topk(self.num_chosen).indices  # [B*T, top]
        shares = shares.gather(-1, chosen)
        if self.makes_up_one:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            share = shares[row, place, None].to(x.dtype)
            mixed = mixed.index_add(0, row, expert(rows[row]) * share)
        return mixed.view_as(x)


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
        """The matrices of values [kv heads * hd, D] and of the output [D, heads * hd]."""
        return self.self_attn.v_proj.weight, self.self_attn.o_proj.weight

    def forward(self, x: Tensor, view: View) -> Tensor:
        """Map x [B, T, D] to [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), view)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    """The whole network with random weights; see family.Network.

    Args:
        make_layer: builds layer number i. The layer is called with rows and their `View`, and has a
            property `value_and_output`.
        shift_rows: whether position i is predicted by row i - 1, and position 0 by row 0.
        block_length: see family.Network.
        rotary_dim: rotated channels of a head; None: all.
        embedding_name: name of the embedding's matrix in the checkpoint.
        head_bias: whether the head has a bias; a tied embedding replaces the head.

    Attributes:
        embedding_scale, logits_scale: factors of the outputs of the embedding and the head.
        rotates_in_fp32: whether the rotation is fp32 if rows have fewer bits.
    """

    embedding_scale = logits_scale = 1.0
    rotates_in_fp32 = False

    def __init__(
        self,
        config: dict[str, Any],
        make_layer: Callable[[int], nn.Module],
        *,
        shift_rows: bool = False,
        block_length: int = 0,
        rotary_dim: int | None = None,
        embedding_name: str = "embed_tokens",
        head_bias: bool = False,
    ) -> None:
        super().__init__()
        width, rows = config["hidden_size"], config["vocab_size"]
        self.rotary_dim = rotary_dim or head_width(config)
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
        is_tied = config.get("tie_word_embeddings", False)
        self.lm_head = None if is_tied else nn.Linear(width, rows, bias=head_bias)
        attentions = (layer.value_and_output for layer in self.model["layers"])
        initialise(self, self.embedding, self.lm_head, attentions, head_width(config))

    @property
    def embedding(self) -> nn.Embedding:
        """The embedding module."""
        return cast("nn.Embedding", self.model[self.embedding_name])

    def hidden(self, ids: Tensor, clean: Tensor | None = None) -> Tensor:
        """Map ids [B, T] int64 to final normed hidden states [B, T, D] fp32.

        Row i predicts token i.
        """
        length, is_doubled = ids.shape[-1], bool(self.block_length) and clean is not None
        if is_doubled:
            ids = torch.cat((cast("Tensor", clean), ids), dim=-1)
        cos, sin = self.rotary(torch.arange(length))
        view = View(cos, sin, None)
        if is_doubled:
            sees = noised_behind_clean(length, self.block_length)
            view = View(torch.cat((cos, cos)), torch.cat((sin, sin)), sees.to(cos.device))
        elif self.block_length:
            view = View(cos, sin, block_causal(length, self.block_length).to(cos.device))
        x = self.rows(ids, view)
        rows = torch.arange(x.shape[1] - length, x.shape[1])
        if self.shift_rows:
            rows = self._rows_before(length, is_doubled)
        return cast("Tensor", self.model["norm"](x[:, rows]))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [T] int64, [T, rotated channels of a head] each."""
        weight = self.embedding.weight
        precise = positions.to(weight.device, wide(weight.dtype))
        cos, sin = rotary_tables(precise, self.rotary_dim, self.rope_theta)
        dtype = cos.dtype if self.rotates_in_fp32 else weight.dtype
        return cos.to(dtype), sin.to(dtype)

    def rows(self, ids: Tensor, view: View) -> Tensor:
        """Map ids [B, T] int64 to hidden states [B, T, D] before the last norm."""
        x: Tensor = self.embedding(ids)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale
        for layer in cast("nn.ModuleList", self.model["layers"]):
            x = layer(x, view)
        return x

    def _rows_before(self, length: int, is_doubled: bool) -> Tensor:
        """Return the row that predicts each position.

        The first position of a block is predicted by the finished block before it.
        """
        position = torch.arange(length)
        before = (position - 1).clamp(min=0)
        if is_doubled:
            before += length * (position % self.block_length != 0)
        return before

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [..., D] to logits [..., rows of the embedding] fp32."""
        if self.lm_head is None:
            logits = F.linear(hidden, self.embedding.weight)
        else:
            logits = self.lm_head(hidden)
        return logits if self.logits_scale == 1 else logits * self.logits_scale


def dense_network(
    config: dict[str, Any],
    *,
    qkv_bias: bool = False,
    qk_norm: Literal["", "head"] = "",
    shift_rows: bool = False,
    block_length: int = 0,
) -> Decoder:
    """Build a network without experts, with random weights; see Attention and Decoder."""

    def make_layer(_: int) -> Layer:
        attention = Attention(config, qkv_bias=qkv_bias, qk_norm=qk_norm)
        mlp = GatedMLP(config["hidden_size"], config["intermediate_size"])
        return Layer(config, attention, mlp)

    return Decoder(config, make_layer, shift_rows=shift_rows, block_length=block_length)

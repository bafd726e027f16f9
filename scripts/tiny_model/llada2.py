# SPDX-License-Identifier: Apache-2.0
"""The LLaDA2 family at tiny size.

Configuration keys, tensor names and forward pass follow the released LLaDA2.0-mini (Bie et al.
2025, arXiv:2512.15745, https://huggingface.co/inclusionAI/LLaDA2.0-mini): block-causal attention
that rotates half of each head, a dense first layer, then layers with routed experts and a shared
one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny_model.decoder import Decoder, GatedMLP, head_width
from tiny_model.decoding import low_confidence_dynamic
from tiny_model.family import Family, TokenIds
from tiny_model.layers import attend, embedding_rows, wide
from tiny_model.llada_moe import CHAT_TEMPLATE, ROLES, SPECIAL_TOKENS
from tiny_model.settings import BLOCK_LENGTHS

if TYPE_CHECKING:
    from tiny_model.layers import View

# Change per training forward of the bias of an expert that is chosen more or less than its share
_BIAS_STEP = 1e-3


def config(tokens: TokenIds) -> dict[str, Any]:
    """Return the contents of config.json: LLaDA2.0-mini's keys, at tiny size and in fp32."""
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "first_k_dense_replace": 1,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "initializer_range": 0.02,
        "intermediate_size": 256,
        "max_position_embeddings": 32768,
        "max_window_layers": 4,
        "model_type": "llada2_moe",
        "moe_intermediate_size": 64,
        "moe_router_enable_expert_bias": True,
        "n_group": 4,
        "norm_head": False,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_shared_experts": 1,
        "output_dropout": 0.0,
        "pad_token_id": tokens.eos,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 600000,
        "rotary_dim": 16,
        "routed_scaling_factor": 2.5,
        "router_dtype": "fp32",
        "score_function": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 2,
        "torch_dtype": "float32",
        "use_bias": False,
        "use_cache": False,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "vocab_size": embedding_rows(tokens.vocab_size),
    }


class FusedAttention(nn.Module):
    """Attention whose queries, keys and values come from one matrix, in this order."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, self.head_dim = config["hidden_size"], head_width(config)
        kv_heads, eps = config["num_key_value_heads"], config["rms_norm_eps"]
        self.num_heads = (config["num_attention_heads"], kv_heads, kv_heads)
        self.query_key_value = nn.Linear(width, sum(self.num_heads) * self.head_dim, bias=False)
        self.query_layernorm = nn.RMSNorm(self.head_dim, eps)
        self.key_layernorm = nn.RMSNorm(self.head_dim, eps)
        self.dense = nn.Linear(self.num_heads[0] * self.head_dim, width, bias=False)

    def forward(self, x: Tensor, view: View) -> Tensor:
        """Map x [B, T, D] to [B, T, D]."""
        heads = self.query_key_value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.num_heads, dim=1)
        attended = attend(self.query_layernorm(q), self.key_layernorm(k), v, view)
        return cast("Tensor", self.dense(attended))


class Router(nn.Module):
    """Chooses experts within the best groups; a bias that is not trained balances their use."""

    expert_bias: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, num_experts = config["hidden_size"], config["num_experts"]
        self.num_groups, self.num_chosen_groups = config["n_group"], config["topk_group"]
        self.num_chosen, self.scale = config["num_experts_per_tok"], config["routed_scaling_factor"]
        self.weight = nn.Parameter(torch.randn(num_experts, width) * width**-0.5)
        self.register_buffer("expert_bias", torch.zeros(num_experts))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Map rows [R, D] to shares and numbers of the chosen experts, [R, top] each."""
        dtype = wide(rows.dtype)
        scores = F.linear(rows.to(dtype), self.weight.to(dtype)).sigmoid()
        chosen = self.open(scores + self.expert_bias).topk(self.num_chosen).indices
        if self.training:
            load = torch.bincount(chosen.flatten(), minlength=len(self.weight)).float()
            self.expert_bias += _BIAS_STEP * (load.mean() - load).sign()
        shares = self.scale * scores.gather(-1, chosen)
        if self.num_chosen > 1:
            shares = shares / (scores.gather(-1, chosen).sum(dim=-1, keepdim=True) + 1e-20)
        return shares, chosen

    def open(self, ranks: Tensor) -> Tensor:
        """Return ranks [R, experts] with -inf for the experts that a row may not choose."""
        grouped = ranks.unflatten(-1, (self.num_groups, -1))
        groups = grouped.topk(2).values.sum(dim=-1).topk(self.num_chosen_groups).indices
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, groups, False)
        return grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)


class MixtureOfExperts(nn.Module):
    """The weighted sum of the chosen experts, plus the shared experts, which process all rows."""

    def __init__(self, config: dict[str, Any], router: type[Router]) -> None:
        super().__init__()
        width, inner_width = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = router(config)
        self.experts = nn.ModuleList(
            GatedMLP(width, inner_width) for _ in range(config["num_experts"])
        )
        num_shared = config["num_shared_experts"]
        self.shared_experts = GatedMLP(width, inner_width * num_shared) if num_shared else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, T, D] to [B, T, D]."""
        rows = x.flatten(0, -2)
        shares, chosen = self.gate(rows)
        mixed = torch.zeros(rows.shape, dtype=shares.dtype, device=rows.device)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            term = expert(rows[row]).to(shares.dtype) * shares[row, place, None]
            mixed = mixed.index_add(0, row, term)
        mixed = mixed.to(x.dtype).view_as(x)
        return mixed if self.shared_experts is None else mixed + self.shared_experts(x)


class Layer(nn.Module):
    """One transformer layer; attribute names are the checkpoint's tensor names."""

    def __init__(self, config: dict[str, Any], mlp: nn.Module) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.attention = FusedAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.mlp = mlp

    @property
    def value_and_output(self) -> tuple[Tensor, Tensor]:
        """The matrices of values [kv heads * hd, D] and of the output [D, heads * hd]."""
        num_rows = self.attention.num_heads[2] * self.attention.head_dim
        return self.attention.query_key_value.weight[-num_rows:], self.attention.dense.weight

    def forward(self, x: Tensor, view: View) -> Tensor:
        """Map x [B, T, D] to [B, T, D]."""
        x = x + self.attention(self.input_layernorm(x), view)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


def network(
    config: dict[str, Any], decoder: type[Decoder] = Decoder, router: type[Router] = Router
) -> Decoder:
    """Build LLaDA2 with random weights; its `state_dict` has the released checkpoints' names."""

    def make_layer(number: int) -> Layer:
        if number < config["first_k_dense_replace"]:
            return Layer(config, GatedMLP(config["hidden_size"], config["intermediate_size"]))
        return Layer(config, MixtureOfExperts(config, router))

    return decoder(
        config,
        make_layer,
        block_length=BLOCK_LENGTHS["llada2"],  # config.json has no block length
        rotary_dim=int(config["partial_rotary_factor"] * head_width(config)),
        embedding_name="word_embeddings",
    )


FAMILY = Family(
    name="llada2",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=ROLES,
    config=config,
    network=network,
    decode=partial(low_confidence_dynamic, threshold=0.95),
    lists_eot=True,
)

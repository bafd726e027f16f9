# SPDX-License-Identifier: Apache-2.0
"""The LLaDA family at tiny size.

Configuration keys, tensor names and forward pass follow the released LLaDA-8B-Instruct checkpoint
(Nie et al. 2025, arXiv:2502.09992, https://github.com/ML-GSAI/LLaDA): a pre-norm transformer with
bidirectional attention, rotary positions, RMSNorm and a gated SiLU feed-forward.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from tiny_model.decoding import semi_autoregressive
from tiny_model.family import Family, SpecialTokens, TokenIds
from tiny_model.layers import embedding_rows, initialise, rotary_tables, rotate

SPECIAL_TOKENS = SpecialTokens(
    bos="<|startoftext|>",
    eos="<|endoftext|>",
    mask="<|mdm_mask|>",
    others=("<|start_header_id|>", "<|end_header_id|>"),
    eot="<|eot_id|>",
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    "{% endif %}"
)


def config(tokens: TokenIds) -> dict[str, Any]:
    """Contents of config.json: every key of LLaDA-8B-Instruct's, at tiny size and in fp32."""
    return {
        "activation_type": "silu",
        "alibi": False,
        "alibi_bias_max": 8.0,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "attention_layer_norm_with_affine": True,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": 128,
        "embedding_dropout": 0.0,
        "embedding_size": embedding_rows(tokens.vocab_size),
        "eos_token_id": tokens.eos,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "init_cutoff_factor": None,
        "init_device": "meta",
        "init_fn": "mitchell",
        "init_std": 0.02,
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": tokens.mask,
        "max_sequence_length": 4096,
        "mlp_hidden_size": 512,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": 4,
        "n_kv_heads": 4,
        "n_layers": 2,
        "pad_token_id": tokens.eos,
        "precision": "amp_bf16",
        "residual_dropout": 0.0,
        "rms_norm_eps": 1e-05,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": 500000.0,
        "scale_logits": False,
        "torch_dtype": "float32",
        "transformers_version": "4.46.2",
        "use_cache": False,
        "vocab_size": tokens.vocab_size,
        "weight_tying": False,
    }


class Block(nn.Module):
    """One transformer layer; attribute names are the checkpoint's tensor names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, ff_width = config["d_model"], config["mlp_hidden_size"]
        self.num_heads = config["n_heads"]
        self.attn_norm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_norm = nn.RMSNorm(width, config["rms_norm_eps"])
        self.ff_proj = nn.Linear(width, ff_width, bias=False)  # gate
        self.up_proj = nn.Linear(width, ff_width, bias=False)
        self.ff_out = nn.Linear(ff_width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D], cos and sin [T, hd] -> [B, T, D]; every token attends to every token."""
        h: Tensor = self.attn_norm(x)
        q, k, v = (
            project(h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.attn_out(attended.transpose(1, 2).flatten(-2))
        h = self.ff_norm(x)
        x = x + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h))
        return x


class LLaDANetwork(nn.Module):
    """LLaDA with random weights; its `state_dict` bears the released checkpoints' names."""

    block_length = 0

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, rows = config["d_model"], config["embedding_size"]
        self.head_dim = width // config["n_heads"]
        self.rope_theta = config["rope_theta"]
        transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(rows, width),
                "blocks": nn.ModuleList(Block(config) for _ in range(config["n_layers"])),
                "ln_f": nn.RMSNorm(width, config["rms_norm_eps"]),
                "ff_out": nn.Linear(width, rows, bias=False),
            }
        )
        self.model = nn.ModuleDict({"transformer": transformer})
        attentions = ((b.v_proj.weight, b.attn_out.weight) for b in transformer["blocks"])
        initialise(self, transformer["wte"], transformer["ff_out"], attentions, self.head_dim)

    def hidden(self, ids: Tensor, clean: Tensor | None = None) -> Tensor:
        """ids [B, T] int64 -> final normed hidden states [B, T, D] fp32; see family.Network."""
        transformer = self._transformer
        x: Tensor = transformer["wte"](ids)
        cos, sin = rotary_tables(ids.shape[-1], self.head_dim, self.rope_theta, x.device)
        for block in cast("nn.ModuleList", transformer["blocks"]):
            x = block(x, cos, sin)
        return cast("Tensor", transformer["ln_f"](x))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., embedding_size] fp32."""
        return cast("Tensor", self._transformer["ff_out"](hidden))

    @property
    def _transformer(self) -> nn.ModuleDict:
        return cast("nn.ModuleDict", self.model["transformer"])


FAMILY = Family(
    name="llada",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=("\n\n", "system", "user", "assistant"),
    config=config,
    network=LLaDANetwork,
    decode=semi_autoregressive,
)

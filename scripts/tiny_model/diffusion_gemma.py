# SPDX-License-Identifier: Apache-2.0
"""The DiffusionGemma family at tiny size.

Configuration keys, tensor names and forward pass follow the released DiffusionGemma-26B-A4B (Google
DeepMind 2026). The context is causal. A canvas behind it has no mask token: it begins as random
tokens, all of its rows attend to each other and to the context, and each predicts its own token.
The rows of a canvas also read the embeddings that the previous step expects (self-conditioning).
The chat template has the turns of text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny_model.decoding import entropy_bound
from tiny_model.family import Family, SpecialTokens, TokenIds
from tiny_model.layers import View, attend, embedding_rows, initialise, rotary_tables

if TYPE_CHECKING:
    from collections.abc import Mapping

SPECIAL_TOKENS = SpecialTokens(
    bos="<bos>",
    eos="<eos>",
    mask="<mask>",  # a token of the vocabulary that answers do not contain
    others=("<pad>", "<|turn>"),
    eot="<turn|>",
    names_mask=False,
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn>' + message['role'].replace('assistant', 'model') + '\n' }}"
    "{{ message['content'] + '<turn|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)

_SLIDING, _FULL = "sliding_attention", "full_attention"
# Our prefix, the checkpoint's prefix
_NAMES = (("context_scalars.", "model.encoder.language_model.layers."), ("", "model.decoder."))
_FEED_FORWARD_GAIN = 0.3
_PATTERN = 6  # every sixth layer is a full one, and the last
_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def config(tokens: TokenIds) -> dict[str, Any]:
    """Return the contents of config.json: the keys of 26B-A4B, at tiny size and in fp32.

    The keys of the text model are at the top level.
    """
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "bos_token_id": tokens.bos,
        "canvas_length": 32,
        "eos_token_id": tokens.eos,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 64,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 128,
        "intermediate_size": 128,
        "max_position_embeddings": 262144,
        "model_type": "diffusion_gemma",
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_experts": 4,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            _FULL: {
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
                "rope_type": "proportional",
            },
            _SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 128,
        "tie_word_embeddings": True,
        "top_k_experts": 2,
        "torch_dtype": "float32",
        "vocab_size": embedding_rows(tokens.vocab_size),
    }


class _Kinds(NamedTuple):
    """Which rows belong to a canvas, [B, T] bool, and the views of both kinds of layers."""

    is_canvas: Tensor
    views: dict[str, View]


class _Attention(nn.Module):
    """Attention without a scale, whose values are normed; full layers have no own values."""

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        is_full = kind == _FULL
        width, num_heads, eps = (
            config[key] for key in ("hidden_size", "num_attention_heads", "rms_norm_eps")
        )
        self.head_dim = config["global_head_dim" if is_full else "head_dim"]
        num_kv_heads = config["num_global_key_value_heads" if is_full else "num_key_value_heads"]
        self.q_proj = nn.Linear(width, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        if not is_full:
            self.v_proj = nn.Linear(width, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, width, bias=False)
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps) for _ in "qk")
        for norm in (self.q_norm, self.k_norm):  # together the usual scale, 1 / sqrt(head_dim)
            nn.init.constant_(norm.weight, self.head_dim**-0.25)
        self.eps = eps

    @property
    def value_and_output(self) -> tuple[Tensor, Tensor]:
        values = getattr(self, "v_proj", self.k_proj)
        return cast("Tensor", values.weight), self.o_proj.weight

    def forward(self, x: Tensor, view: View) -> Tensor:
        q, k = self.q_proj(x), self.k_proj(x)
        v = self.v_proj(x) if hasattr(self, "v_proj") else k
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in (q, k, v))
        v = F.rms_norm(v, (self.head_dim,), eps=self.eps)
        # `attend` divides by the root of the width.
        q, k = self.q_norm(q) * self.head_dim**0.5, self.k_norm(k)
        return cast("Tensor", self.o_proj(attend(q, k, v, view)))


class _GatedMLP(nn.Module):
    """down(gelu(gate x) * up x)."""

    def __init__(self, width: int, inner_width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner_width, bias=False)
        self.up_proj = nn.Linear(width, inner_width, bias=False)
        self.down_proj = nn.Linear(inner_width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        return cast("Tensor", self.down_proj(inner))


class _Router(nn.Module):
    """Shares of all experts, 0 for experts that are not chosen."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, num_experts = config["hidden_size"], config["num_experts"]
        self.proj = nn.Linear(width, num_experts, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        self.per_expert_scale = nn.Parameter(torch.ones(num_experts))
        self.num_chosen, self.eps = config["top_k_experts"], config["rms_norm_eps"]

    def forward(self, x: Tensor) -> Tensor:
        rows = F.rms_norm(x, x.shape[-1:], self.scale, self.eps) * x.shape[-1] ** -0.5
        shares = self.proj(rows).softmax(dim=-1)
        best, chosen = shares.topk(self.num_chosen)
        best = best / best.sum(dim=-1, keepdim=True) * self.per_expert_scale[chosen]
        return torch.zeros_like(shares).scatter(-1, chosen, best)


class _Layer(nn.Module):
    """One layer of the decoder; attribute names are the checkpoint's tensor names.

    All experts are computed for all rows, which is fast for a few small experts.
    """

    def __init__(self, config: dict[str, Any], kind: str) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.kind = kind
        self.self_attn = _Attention(config, kind)
        self.mlp = _GatedMLP(width, config["intermediate_size"])
        self.router = _Router(config)
        self.experts = nn.ModuleList(
            _GatedMLP(width, config["moe_intermediate_size"]) for _ in range(config["num_experts"])
        )
        for name in (
            *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"),
            *("post_feedforward_layernorm", "post_feedforward_layernorm_1"),
            *("post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"),
        ):
            self.add_module(name, nn.RMSNorm(width, eps))
        # A norm makes the branch as large as its input. Random, it would hide the rows' words.
        nn.init.constant_(self.post_feedforward_layernorm.weight, _FEED_FORWARD_GAIN)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, kinds: _Kinds, context_scalar: Tensor) -> Tensor:
        """Map x [B, T, D] to [B, T, D]."""
        attended = self.self_attn(self.input_layernorm(x), kinds.views[self.kind])
        x = x + self.post_attention_layernorm(attended)
        dense = self.post_feedforward_layernorm_1(self.mlp(self.pre_feedforward_layernorm(x)))
        shares, rows = self.router(x), self.pre_feedforward_layernorm_2(x)
        mixed = sum(
            shares[..., number, None] * expert(rows) for number, expert in enumerate(self.experts)
        )
        mixed = self.post_feedforward_layernorm_2(mixed)
        x = x + self.post_feedforward_layernorm(dense + mixed)
        return torch.where(kinds.is_canvas[..., None], self.layer_scalar, context_scalar) * x


class _ContextScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = nn.Parameter(torch.ones(1))


class _SelfConditioning(_GatedMLP):
    """Adds an MLP of the expected embeddings to the rows of a canvas, and norms the sum."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config["hidden_size"], config["intermediate_size"])
        self.pre_norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.eps = config["rms_norm_eps"]

    def condition(self, x: Tensor, soft: Tensor | None) -> Tensor:
        signal = 0.0 if soft is None else self(self.pre_norm(soft))
        return F.rms_norm(x + signal, x.shape[-1:], eps=self.eps)


class GemmaNetwork(nn.Module):
    """DiffusionGemma with random weights; see family.OpenNetwork.

    Its `state_dict` has the released checkpoints' names.
    """

    block_length = 0

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.window, self.cap = config["sliding_window"], config["final_logit_softcapping"]
        self.widths = {_SLIDING: config["head_dim"], _FULL: config["global_head_dim"]}
        self.ropes = config["rope_parameters"]
        self.num_tokens: int = config["vocab_size"]
        self.embed_tokens = nn.Embedding(self.num_tokens, width)
        num_layers = config["num_hidden_layers"]
        is_full = [(i + 1) % _PATTERN == 0 or i + 1 == num_layers for i in range(num_layers)]
        kinds = [_FULL if full else _SLIDING for full in is_full]
        self.layers = nn.ModuleList(_Layer(config, kind) for kind in kinds)
        self.norm = nn.RMSNorm(width, eps)
        self.self_conditioning = _SelfConditioning(config)
        self.context_scalars = nn.ModuleList(_ContextScalar() for _ in self.layers)
        initialise(self.self_conditioning, self.embed_tokens, None, (), 0)
        for layer in self.layers:
            attention = cast("_Layer", layer).self_attn
            of_layer = [attention.value_and_output]
            initialise(layer, self.embed_tokens, None, of_layer, attention.head_dim)
        # Rows of the residual stream begin with elements of about 1.
        self.embedding_scale = width**0.5
        nn.init.normal_(self.embed_tokens.weight, std=1 / self.embedding_scale)

    def denoised(self, ids: Tensor, starts: Tensor, soft: Tensor | None) -> Tensor:
        """See family.OpenNetwork."""
        positions = torch.arange(ids.shape[1])
        is_canvas = positions >= starts[:, None]
        within, before = is_canvas[..., None] & is_canvas[:, None], ~is_canvas[:, None]
        causal = positions[:, None] >= positions
        # The window of a canvas ends where the canvas begins.
        first = torch.where(is_canvas, starts[:, None], positions) - self.window
        in_window = positions > first[..., None]
        views = {}
        for kind, width in self.widths.items():
            seen = before & (causal | is_canvas[..., None])
            if kind == _SLIDING:
                seen = seen & in_window
            views[kind] = View(*self._rotary(kind, width, positions), (seen | within)[:, None])
        x = self.embed_tokens(ids) * self.embedding_scale
        x = torch.where(is_canvas[..., None], self.self_conditioning.condition(x, soft), x)
        for layer, scalar in zip(self.layers, self.context_scalars, strict=True):
            x = layer(x, _Kinds(is_canvas, views), scalar.layer_scalar)
        return cast("Tensor", self.norm(x))

    def hidden(self, ids: Tensor, clean: Tensor | None = None) -> Tensor:
        """See family.Network; all rows are a canvas."""
        return self.denoised(ids, ids.new_zeros(len(ids)), None)

    def _rotary(self, kind: str, width: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        rope = self.ropes[kind]
        cos, sin = rotary_tables(positions.float(), width, rope["rope_theta"])
        turned = int(rope.get("partial_rotary_factor", 1.0) * width // 2)
        is_still = torch.arange(width) % (width // 2) >= turned
        return cos.masked_fill(is_still, 1.0), sin.masked_fill(is_still, 0.0)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden [..., D] to logits [..., rows of the embedding] fp32."""
        return torch.tanh(F.linear(hidden, self.embed_tokens.weight) / self.cap) * self.cap

    def expected(self, logits: Tensor) -> Tensor:
        """See family.OpenNetwork."""
        return logits.softmax(dim=-1) @ self.embed_tokens.weight * self.embedding_scale

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the tensors by the checkpoint's names."""
        own = super().state_dict(*args, **options)
        for number in range(len(self.layers)):
            prefix = f"layers.{number}.experts."
            experts = [own.pop(name) for name in [*own] if name.startswith(prefix)]
            gates, ups, downs = (torch.stack(experts[part::3]) for part in range(3))
            own[f"{prefix}gate_up_proj"] = torch.cat((gates, ups), dim=1)
            own[f"{prefix}down_proj"] = downs
        return {_renamed(name, 0, 1): tensor for name, tensor in own.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load tensors that have the checkpoint's names."""
        own = dict[str, Tensor]()
        for name, tensor in state_dict.items():
            path, _, kind = _renamed(name, 1, 0).rpartition(".")
            if kind not in _STACKED:
                own[f"{path}.{kind}"] = tensor
                continue
            for expert, matrix in enumerate(tensor):
                parts = _STACKED[kind]
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    own[f"{path}.{expert}.{part}.weight"] = rows
        return super().load_state_dict(own, *args, **options)


def _renamed(name: str, before: int, after: int) -> str:
    """Return a name with the prefix that belongs to its own one."""
    prefixes = next(prefixes for prefixes in _NAMES if name.startswith(prefixes[before]))
    return prefixes[after] + name.removeprefix(prefixes[before])


FAMILY = Family(
    name="diffusion-gemma",
    special_tokens=SPECIAL_TOKENS,
    chat_template=CHAT_TEMPLATE,
    template_texts=("\n", "system", "user", "model"),
    config=config,
    network=GemmaNetwork,
    decode=entropy_bound,
    lists_eot=True,
)

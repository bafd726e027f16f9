# SPDX-License-Identifier: Apache-2.0
"""The three families and LLaDA's generate loop in plain PyTorch: what the engine is compared with.

Written from the models' descriptions (LLaDA: arXiv:2502.09992, https://github.com/ML-GSAI/LLaDA;
Dream: arXiv:2508.15487; LLaDA-MoE: arXiv:2509.24389), as their public code runs them: one module
call after the other, PyTorch's own attention, logits of all rows, one request at a time, no cache.

Letters: B rows of the batch, T positions, D width, H heads, K key and value heads, hd head width.
"""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.shapes import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

WEIGHT_STD = 0.02
EMBEDDING_STD = 1.0
DRAWN_AT_ONCE = 1 << 26  # numbers
EMBEDDINGS = ("wte", "embed_tokens", "word_embeddings")

# LLaDA's tensor names -> those of the modules below; the other families' need only the prefix off.
LLADA_NAMES = {
    r"^model\.transformer\.wte\.": "embed_tokens.",
    r"^model\.transformer\.ln_f\.": "norm.",
    r"^model\.transformer\.ff_out\.": "lm_head.",
    r"^model\.transformer\.blocks\.": "layers.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ff_norm\.": ".post_attention_layernorm.",
    r"\.(q_proj|k_proj|v_proj)\.": r".self_attn.\1.",
    r"\.attn_out\.": ".self_attn.o_proj.",
    r"\.ff_proj\.": ".mlp.gate_proj.",
    r"\.up_proj\.": ".mlp.up_proj.",
    r"\.ff_out\.": ".mlp.down_proj.",
}


class RMSNorm(nn.Module):
    """Statistics in fp32, cast back, then times the gain."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., width], any dtype -> the same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Bidirectional attention with separate products for query, key and value."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        kv_width = shape.num_kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.rotates_in_fp32 = shape.rotates_in_fp32
        self.q_proj = nn.Linear(shape.width, shape.width, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.width, kv_width, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, shape.eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.eps)
        self.has_norms = shape.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D], cos and sin [T, hd] fp32 -> [B, T, D]."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        repeats = q.shape[1] // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return cast("Tensor", self.o_proj(attended.transpose(1, 2).flatten(-2)))

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions of x [B, heads, T, hd]; channel j pairs with channel j + hd / 2."""
        dtype = torch.float32 if self.rotates_in_fp32 else x.dtype
        wide, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
        low, high = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


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


class MixtureOfExperts(nn.Module):
    """Every expert over the rows that chose it; shares of a softmax over all, not renormalised."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_chosen = shape.num_chosen
        self.gate = nn.Linear(shape.width, shape.num_experts, bias=False)
        self.experts = nn.ModuleList(
            GatedMLP(shape.width, shape.mlp_width) for _ in range(shape.num_experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, D] -> [B, T, D]."""
        rows = x.flatten(0, -2)
        shares, chosen = self.gate(rows).float().softmax(dim=-1).topk(self.num_chosen)
        mixed = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            share = shares[row, place, None].to(x.dtype)
            mixed.index_add_(0, row, expert(rows[row]) * share)
        return mixed.view_as(x)


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.eps)
        self.mlp: nn.Module = (
            MixtureOfExperts(shape) if shape.num_experts else GatedMLP(shape.width, shape.mlp_width)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D], cos and sin [T, hd] -> [B, T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast("Tensor", x + self.mlp(self.post_attention_layernorm(x)))


class PlainModel(nn.Module):
    """A diffusion language model; make one with `random_model` or `load_model`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.width, shape.eps)
        self.lm_head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, T] int64 -> final normed hidden states [B, T, D]."""
        cos, sin = self._rotary_tables(ids.shape[-1])
        x: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return cast("Tensor", self.norm(x))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] int64 -> logits [B, T, V] in the model's dtype, row i of position i."""
        logits: Tensor = self.lm_head(self.hidden(ids))
        if self.shape.shifts_rows:
            logits = torch.cat((logits[:, :1], logits[:, :-1]), dim=1)
        return logits

    def _rotary_tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [length, hd] fp32."""
        device, head_dim = self.norm.weight.device, self.shape.head_dim
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = torch.outer(positions, self.shape.rope_theta**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


# --- making one ------------------------------------------------------------------------------


def random_model(
    shape: Shape, device: str | torch.device, dtype: torch.dtype = torch.bfloat16
) -> PlainModel:
    """A model with the weights of `randomise`, in eval mode."""
    model = _empty_model(shape, device, dtype)
    randomise(model)
    return model


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Draw every matrix of a model from N(0, 0.02); norms' gains become 1, biases 0.

    Embeddings are drawn from N(0, 1): a row is then told by its token, as in a trained model. With
    small ones all rows follow the mean of their values, and choose the same experts. A weight that
    an engine quantises as it is loaded is given a matrix to quantise.
    """
    for name, parameter in model.named_parameters():
        put = getattr(parameter, "take_part", None)
        if put is not None and parameter.dim() > 1:
            depth = parameter.num_weights // parameter[..., 0].numel()  # bytes may hold two
            count = max(1, DRAWN_AT_ONCE // (parameter[0, ..., 0].numel() * depth))
            for start in range(0, len(parameter), count):
                rows = slice(start, min(start + count, len(parameter)))
                shape = (rows.stop - rows.start, *parameter.shape[1:-1], depth)
                drawn = torch.empty(shape, dtype=torch.float32, device=parameter.device)
                put(rows, drawn.normal_(std=WEIGHT_STD))
        elif parameter.dim() > 1:
            is_embedding = any(part in name for part in EMBEDDINGS)
            parameter.normal_(std=EMBEDDING_STD if is_embedding else WEIGHT_STD)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def load_model(folder: Path, device: str | torch.device, dtype: torch.dtype) -> PlainModel:
    """The model of a checkpoint folder with config.json and an index of safetensors shards."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    model = _empty_model(Shape.of(config), device, dtype)
    weights: dict[str, Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        weights |= {_own_name(key): value for key, value in load_file(folder / name).items()}
    model.load_state_dict(weights)
    return model


def _empty_model(shape: Shape, device: str | torch.device, dtype: torch.dtype) -> PlainModel:
    with torch.device("meta"):
        model = PlainModel(shape)
    return model.to(dtype).to_empty(device=device).eval().requires_grad_(False)


def _own_name(name: str) -> str:
    if name.startswith("model.transformer."):
        for pattern, own in LLADA_NAMES.items():
            name = re.sub(pattern, own, name)
        return name
    return name.removeprefix("model.")


# --- decoding --------------------------------------------------------------------------------


@torch.inference_mode()
def denoise_step(
    model: PlainModel,
    row: Tensor,
    end: int,
    num_commits: int,
    confidence_dtype: torch.dtype | None = None,
) -> None:
    """One step of LLaDA's generate loop at temperature 0: forward, confidence of all rows, commit.

    Args:
        row: [1, T] int64 prompt and canvas; the most confident masked positions are filled in.
        end: positions from here on wait for a later block.
        num_commits: how many are committed.
        confidence_dtype: precision of the softmax; None: the logits' own.
    """
    is_masked = row == model.shape.mask_id
    logits = model(row)
    tokens = torch.where(is_masked, logits.argmax(dim=-1), row)  # [1, T]
    probabilities = F.softmax(logits.to(confidence_dtype or logits.dtype), dim=-1)
    confidence = probabilities.gather(-1, tokens[..., None]).squeeze(-1)
    confidence[:, end:] = -torch.inf
    confidence = confidence.masked_fill(~is_masked, -torch.inf)
    chosen = confidence[0].topk(num_commits).indices
    row[0, chosen] = tokens[0, chosen]


def generate(
    model: PlainModel,
    prompt: Sequence[int],
    *,
    canvas: int,
    block_length: int,
    steps: int,
    confidence_dtype: torch.dtype | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> list[int]:
    """The tokens of a canvas behind `prompt`, block after block.

    Args:
        steps: forwards of the whole canvas, a multiple of the number of blocks.

    Raises:
        ValueError: blocks do not tile the canvas, or steps the blocks.
    """
    if canvas % block_length or steps % (canvas // block_length):
        raise ValueError(
            f"block_length, steps: wanted a divisor of the canvas {canvas} and a multiple of the "
            f"number of blocks, got {block_length} and {steps}"
        )
    device = model.norm.weight.device
    row = torch.tensor([[*prompt, *[model.shape.mask_id] * canvas]], device=device)
    steps_of_block = steps // (canvas // block_length)
    for start in range(len(prompt), len(prompt) + canvas, block_length):
        for num_commits in commits_of_steps(block_length, steps_of_block):
            denoise_step(model, row, start + block_length, num_commits, confidence_dtype)
            after_step()
    tokens: list[int] = row[0, len(prompt) :].tolist()
    return tokens


def commits_of_steps(num_masked: int, steps: int) -> Iterator[int]:
    """How many positions each step commits; the first ones take the remainder."""
    base, remainder = divmod(num_masked, steps)
    return (base + (step < remainder) for step in range(steps))


@contextmanager
def counted_experts(model: PlainModel) -> Iterator[list[int]]:
    """Collects the experts that at least one row passes, a number for each layer of each forward.

    Raises:
        ValueError: the model has no experts.
    """
    counts: list[int] = []

    @torch.inference_mode()
    def count(module: nn.Module, arguments: Any, _result: Any) -> None:
        scores = cast("MixtureOfExperts", module).gate(arguments[0].flatten(0, -2)).float()
        chosen = scores.topk(cast("int", module.num_chosen)).indices
        counts.append(chosen.unique().numel())

    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if not mixtures:
        raise ValueError(f"model: wanted one with experts, got {model.shape.family}")
    handles = [module.register_forward_hook(count) for module in mixtures]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()

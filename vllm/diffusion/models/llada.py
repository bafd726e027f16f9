# SPDX-License-Identifier: Apache-2.0
"""LLaDA (Nie et al. 2025, arXiv:2502.09992), and checkpoints of the same architecture.

A Llama-like transformer without a causal mask: logits at a position predict the token at that
position. Modules bear the names of the released checkpoints, so that the layer names of a
quantised checkpoint's configuration hold as they are; only q, k, v and gate, up are fused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import nn

from vllm.diffusion import ops
from vllm.diffusion.families import LLADA, Family
from vllm.diffusion.layers.attention import SelfAttention
from vllm.diffusion.layers.mlp import GatedMLP
from vllm.diffusion.layers.norm import AllHeadsRMSNorm, RMSNorm
from vllm.diffusion.layers.parallel import embed_rows, keep_plain
from vllm.diffusion.layers.rotary import Rotary, inverse_frequencies, rotary_rows
from vllm.diffusion.models.base import DiffusionLayer, DiffusionModel
from vllm.diffusion.models.weights import Destination, load_checkpoint
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.model_executor.models.utils import maybe_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from vllm.config import VllmConfig
    from vllm.diffusion.buffers import Buffers
    from vllm.diffusion.models.configs import LLaDAConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig

# Parts of the fused modules: checkpoint module -> (module, shard).
_FUSED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "ff_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class LLaDABlock(DiffusionLayer):
    """One layer: pre-norm attention, pre-norm gated MLP, each added to the residual stream."""

    def __init__(
        self, config: LLaDAConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        width, eps, bias = config.d_model, config.rms_norm_eps, config.include_bias
        self.attn_norm = RMSNorm(width, eps)
        self.qkv_proj = keep_plain(
            QKVParallelLinear(
                hidden_size=width,
                head_size=config.head_dim,
                total_num_heads=config.n_heads,
                total_num_kv_heads=config.n_kv_heads,
                bias=bias or bool(config.include_qkv_bias),
                quant_config=quant_config,
                prefix=f"{prefix}.qkv_proj",
            )
        )
        self.q_norm: AllHeadsRMSNorm | None = None
        self.k_norm: AllHeadsRMSNorm | None = None
        if config.attention_layer_norm:
            self.q_norm = AllHeadsRMSNorm(config.n_heads, config.head_dim, eps)
            self.k_norm = AllHeadsRMSNorm(config.n_kv_heads, config.head_dim, eps)
        self.attn_out = keep_plain(
            RowParallelLinear(
                width, width, bias=bias, quant_config=quant_config, prefix=f"{prefix}.attn_out"
            )
        )
        self.ff_norm = RMSNorm(width, eps)
        self.gate_up_proj = keep_plain(
            MergedColumnParallelLinear(
                width,
                [config.mlp_hidden_size] * 2,
                bias=bias,
                quant_config=quant_config,
                prefix=f"{prefix}.gate_up_proj",
            )
        )
        self.ff_out = keep_plain(
            RowParallelLinear(
                config.mlp_hidden_size,
                width,
                bias=bias,
                quant_config=quant_config,
                prefix=f"{prefix}.ff_out",
            )
        )
        self.attention = SelfAttention(
            self.attn_norm, self.qkv_proj, self.attn_out, self.q_norm, self.k_norm
        )
        self.mlp_stage = GatedMLP(self.ff_norm, self.gate_up_proj, self.ff_out)


class LLaDATransformer(nn.Module):
    """Embedding, layers, last norm and head, named as in the checkpoint.

    With tied weights the head shares the embedding's matrix and has no bias.
    """

    def __init__(
        self, config: LLaDAConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.wte = keep_plain(
            VocabParallelEmbedding(
                config.embedding_size,
                config.d_model,
                quant_config=quant_config,
                prefix=f"{prefix}.wte",
            )
        )
        self.blocks = nn.ModuleList(
            LLaDABlock(config, quant_config, f"{prefix}.blocks.{index}")
            for index in range(config.n_layers)
        )
        self.ln_f = RMSNorm(config.d_model, config.rms_norm_eps)
        self.ff_out = keep_plain(
            ParallelLMHead(
                config.embedding_size,
                config.d_model,
                bias=config.include_bias and not config.weight_tying,
                quant_config=quant_config,
                prefix=f"{prefix}.ff_out",
            )
        )
        if config.weight_tying:
            self.ff_out = self.ff_out.tie_weights(self.wte)


class LLaDAModelLM(DiffusionModel, SupportsQuant):
    """A LLaDA checkpoint as a vLLM model."""

    family: ClassVar[Family] = LLADA
    rotary_frequencies: Tensor
    packed_modules_mapping = {  # noqa: RUF012 (upstream declares it as an attribute of instances)
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["ff_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: LLaDAConfig = vllm_config.model_config.hf_config
        self.config = config
        transformer = LLaDATransformer(
            config, vllm_config.quant_config, maybe_prefix(prefix, "model.transformer")
        )
        self.model = nn.ModuleDict({"transformer": transformer})
        frequencies = inverse_frequencies(config.rope_theta, config.head_dim)
        self.register_buffer("rotary_frequencies", frequencies, persistent=False)

        attention = self.layers[0].qkv_proj
        shard = transformer.ff_out.shard_indices
        self.hidden_size = config.d_model
        self.num_heads = attention.num_heads
        self.num_kv_heads = attention.num_kv_heads
        self.head_dim = config.head_dim
        self.vocab_size = config.embedding_size
        self.vocab_start: int = shard.org_vocab_start_index
        self.num_columns = shard.num_org_elements

    @property
    def layers(self) -> Sequence[LLaDABlock]:
        return cast("Sequence[LLaDABlock]", self._transformer.blocks)

    @property
    def final_norm_weight(self) -> Tensor:
        return self._transformer.ln_f.weight

    @property
    def _transformer(self) -> LLaDATransformer:
        transformer = self.model["transformer"]
        assert isinstance(transformer, LLaDATransformer)
        return transformer

    def embed(self, ids: Tensor, out: Tensor) -> Tensor:
        embed_rows(self._transformer.wte, ids, out)
        if self.config.input_emb_norm:
            out.mul_(self.hidden_size**0.5)
        return out

    def rotary(self, positions: Tensor, buffers: Buffers | None = None) -> Rotary:
        return rotary_rows(
            positions,
            self.rotary_frequencies,
            dtype=torch.float32 if self.config.rope_full_precision else self.dtype,
            buffers=buffers,
        )

    def final_norm(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        normed: Tensor = self._transformer.ln_f(x, out=out)
        return normed

    def compute_logits(self, hidden_states: Tensor, out: Tensor | None = None) -> Tensor:
        columns = slice(0, self.num_columns)
        logits = ops.linear(hidden_states, self._transformer.ff_out, out=out, columns=columns)
        if self.config.scale_logits:
            logits.mul_(1.0 / self.hidden_size**0.5)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        destinations = self._destinations()
        head = "model.transformer.ff_out"
        if not self.config.weight_tying:
            return load_checkpoint(self, weights, destinations)
        del destinations[head]
        return load_checkpoint(self, weights, destinations, ignored={head})

    def _destinations(self) -> dict[str, Destination]:
        """Each module path of a checkpoint, and where its tensors go."""
        root, config = "model.transformer", self.config
        vocabulary, shapes = (config.embedding_size, config.d_model), _block_shapes(config)
        destinations = {
            f"{root}.wte": Destination(f"{root}.wte", vocabulary),
            f"{root}.ln_f": Destination(f"{root}.ln_f", (config.d_model,)),
            f"{root}.ff_out": Destination(f"{root}.ff_out", vocabulary),
        }
        for index in range(config.n_layers):
            block = f"{root}.blocks.{index}"
            source = block
            if config.block_group_size > 1:
                group, member = divmod(index, config.block_group_size)
                source = f"{root}.block_groups.{group}.{member}"
            for name, shape in shapes.items():
                module, shard = _FUSED.get(name, (name, None))
                destinations[f"{source}.{name}"] = Destination(f"{block}.{module}", shape, shard)
        return destinations


def _block_shapes(config: LLaDAConfig) -> dict[str, tuple[int, ...]]:
    """Shape of the weight of each module of a checkpoint's layer."""
    width, inner = config.d_model, config.mlp_hidden_size
    kv_width = config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "q_proj": (width, width),
        "k_proj": (kv_width, width),
        "v_proj": (kv_width, width),
        "attn_out": (width, width),
        "ff_norm": (width,),
        "ff_proj": (inner, width),
        "up_proj": (inner, width),
        "ff_out": (width, inner),
    }
    if config.attention_layer_norm:
        shapes |= {"q_norm": (width,), "k_norm": (kv_width,)}
    return shapes

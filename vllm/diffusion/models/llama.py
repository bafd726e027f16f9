# SPDX-License-Identifier: Apache-2.0
"""Models whose checkpoints bear Llama's names and whose layers are Llama's, without its mask.

A family says what differs: biases, norms of the heads, and the MLP of each layer. As in every
model here q, k, v are fused, and gate, up; all else is named as in the checkpoint, so that the
layer names of a quantised checkpoint's configuration hold as they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

from torch import nn

from vllm.diffusion import ops
from vllm.diffusion.layers.attention import SelfAttention
from vllm.diffusion.layers.mlp import GatedMLP
from vllm.diffusion.layers.norm import RMSNorm
from vllm.diffusion.layers.parallel import embed_rows, keep_plain
from vllm.diffusion.layers.rotary import Rotary, inverse_frequencies, rotary_rows
from vllm.diffusion.models.base import DiffusionLayer, DiffusionModel, FeedForward
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
    from vllm.diffusion.models.configs import DreamConfig, LLaDAMoEConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig

    LlamaNamedConfig = DreamConfig | LLaDAMoEConfig


class MLP(nn.Module, ABC):
    """The weights of a layer's feed-forward stage, under their checkpoint names."""

    @abstractmethod
    def stage(self, norm: RMSNorm) -> FeedForward:
        """The stage over these weights."""

    @abstractmethod
    def destinations(self, path: str) -> dict[str, Destination]:
        """Each module path of the checkpoint's `path`, and where its tensors go."""


class AttentionWeights(nn.Module):
    """The projections, and per-head norms where `head_norm`, under their checkpoint names."""

    def __init__(
        self,
        config: LlamaNamedConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
        *,
        bias: bool,
        head_norm: bool,
    ) -> None:
        super().__init__()
        self.q_width = config.hidden_size
        self.kv_width = config.num_key_value_heads * config.head_dim
        self.qkv_proj = keep_plain(
            QKVParallelLinear(
                hidden_size=config.hidden_size,
                head_size=config.head_dim,
                total_num_heads=config.num_attention_heads,
                total_num_kv_heads=config.num_key_value_heads,
                bias=bias,
                quant_config=quant_config,
                prefix=f"{prefix}.qkv_proj",
            )
        )
        self.o_proj = keep_plain(
            RowParallelLinear(
                config.hidden_size,
                config.hidden_size,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.o_proj",
            )
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if head_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def destinations(self, path: str) -> dict[str, Destination]:
        """Each module path of the checkpoint's `path`, and where its tensors go."""
        width, fused = self.q_width, f"{path}.qkv_proj"
        destinations = {
            f"{path}.q_proj": Destination(fused, (width, width), "q"),
            f"{path}.k_proj": Destination(fused, (self.kv_width, width), "k"),
            f"{path}.v_proj": Destination(fused, (self.kv_width, width), "v"),
            f"{path}.o_proj": Destination(f"{path}.o_proj", (width, width)),
        }
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                destinations[f"{path}.{name}"] = Destination(
                    f"{path}.{name}", tuple(norm.weight.shape)
                )
        return destinations


class DenseMLP(MLP):
    """The matrices of a gated MLP of width `inner`, without biases."""

    def __init__(
        self, hidden_size: int, inner: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        self.hidden_size, self.inner = hidden_size, inner
        self.gate_up_proj = keep_plain(
            MergedColumnParallelLinear(
                hidden_size,
                [inner] * 2,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.gate_up_proj",
            )
        )
        self.down_proj = keep_plain(
            RowParallelLinear(
                inner,
                hidden_size,
                bias=False,
                quant_config=quant_config,
                prefix=f"{prefix}.down_proj",
            )
        )

    def stage(self, norm: RMSNorm) -> FeedForward:
        return GatedMLP(norm, self.gate_up_proj, self.down_proj)

    def destinations(self, path: str) -> dict[str, Destination]:
        inward, fused = (self.inner, self.hidden_size), f"{path}.gate_up_proj"
        return {
            f"{path}.gate_proj": Destination(fused, inward, 0),
            f"{path}.up_proj": Destination(fused, inward, 1),
            f"{path}.down_proj": Destination(f"{path}.down_proj", inward[::-1]),
        }


class LlamaNamedLayer(DiffusionLayer):
    """One layer: pre-norm attention and pre-norm MLP, each added to the residual stream."""

    def __init__(
        self,
        config: LlamaNamedConfig,
        attention: AttentionWeights,
        mlp: MLP,
        clip_qkv: float | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp
        self.attention = SelfAttention(
            self.input_layernorm,
            attention.qkv_proj,
            attention.o_proj,
            attention.q_norm,
            attention.k_norm,
            clip_qkv,
        )
        self.mlp_stage = mlp.stage(self.post_attention_layernorm)

    def destinations(self, path: str) -> dict[str, Destination]:
        """Each module path of the checkpoint's layer `path`, and where its tensors go."""
        norms = ("input_layernorm", "post_attention_layernorm")
        width = tuple(self.input_layernorm.weight.shape)
        return {
            **{f"{path}.{norm}": Destination(f"{path}.{norm}", width) for norm in norms},
            **self.self_attn.destinations(f"{path}.self_attn"),
            **self.mlp.destinations(f"{path}.mlp"),
        }


class LlamaNamedTransformer(nn.Module):
    """Embedding, layers and last norm, named as in the checkpoint."""

    def __init__(
        self,
        config: LlamaNamedConfig,
        layers: Iterable[LlamaNamedLayer],
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.embed_tokens = keep_plain(
            VocabParallelEmbedding(
                config.vocab_size,
                config.hidden_size,
                quant_config=quant_config,
                prefix=f"{prefix}.embed_tokens",
            )
        )
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LlamaNamedModel(DiffusionModel, SupportsQuant, ABC):
    """A checkpoint with Llama's names as a vLLM model; a family makes its layers."""

    config: LlamaNamedConfig
    rotary_frequencies: Tensor
    packed_modules_mapping = {  # noqa: RUF012 (upstream declares it as an attribute of instances)
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        root = maybe_prefix(prefix, "model")
        layers = (
            self.make_layer(index, quant_config, f"{root}.layers.{index}")
            for index in range(config.num_hidden_layers)
        )
        self.model = LlamaNamedTransformer(config, layers, quant_config, root)
        self.lm_head = keep_plain(
            ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)

        frequencies = inverse_frequencies(config.rope_theta, config.rotary_dim)
        self.register_buffer("rotary_frequencies", frequencies, persistent=False)

        attention = self.layers[0].self_attn.qkv_proj
        shard = self.lm_head.shard_indices
        self.hidden_size = config.hidden_size
        self.num_heads = attention.num_heads
        self.num_kv_heads = attention.num_kv_heads
        self.head_dim = config.head_dim
        self.vocab_size = config.vocab_size
        self.vocab_start = shard.org_vocab_start_index
        self.num_columns = shard.num_org_elements

    @abstractmethod
    def make_layer(
        self, index: int, quant_config: QuantizationConfig | None, prefix: str
    ) -> LlamaNamedLayer:
        """The layer `index`, counted from 0, whose modules are below the path `prefix`."""

    @property
    def layers(self) -> Sequence[LlamaNamedLayer]:
        return cast("Sequence[LlamaNamedLayer]", self.model.layers)

    @property
    def final_norm_weight(self) -> Tensor:
        return self.model.norm.weight

    def embed(self, ids: Tensor, out: Tensor) -> Tensor:
        return embed_rows(self.model.embed_tokens, ids, out)

    def rotary(self, positions: Tensor, buffers: Buffers | None = None) -> Rotary:
        return rotary_rows(positions, self.rotary_frequencies, dtype=self.dtype, buffers=buffers)

    def final_norm(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        normed: Tensor = self.model.norm(x, out=out)
        return normed

    def compute_logits(self, hidden_states: Tensor, out: Tensor | None = None) -> Tensor:
        columns = slice(0, self.num_columns)
        return ops.linear(hidden_states, self.lm_head, out=out, columns=columns)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        destinations = self._destinations()
        if not self.config.tie_word_embeddings:
            return load_checkpoint(self, weights, destinations)
        del destinations["lm_head"]
        return load_checkpoint(self, weights, destinations, ignored={"lm_head"})

    def _destinations(self) -> dict[str, Destination]:
        """Each module path of a checkpoint, and where its tensors go."""
        config = self.config
        vocabulary = (config.vocab_size, config.hidden_size)
        destinations = {
            "model.embed_tokens": Destination("model.embed_tokens", vocabulary),
            "model.norm": Destination("model.norm", (config.hidden_size,)),
            "lm_head": Destination("lm_head", vocabulary),
        }
        for index, layer in enumerate(self.layers):
            destinations |= layer.destinations(f"model.layers.{index}")
        return destinations

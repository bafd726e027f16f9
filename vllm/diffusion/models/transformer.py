# SPDX-License-Identifier: Apache-2.0
"""Layers of a model: their stages, their checkpoint, and a run over all rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

from torch import nn

from vllm.diffusion.core.errors import ServerConfigError
from vllm.diffusion.core.spans import AttentionLayout, KeySource
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.layers.head_group_attention import HeadGroupAttention
from vllm.diffusion.layers.norm import RMSNorm
from vllm.diffusion.layers.parallel import without_weight_packing
from vllm.diffusion.models.mixture import MixtureMLP
from vllm.diffusion.models.modules import AttentionWeights, DenseMLP
from vllm.diffusion.models.weights import Destination
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from vllm.diffusion import ops
    from vllm.diffusion.core.spans import Span
    from vllm.diffusion.layers.attention import SelfAttention
    from vllm.diffusion.layers.fp8_attention import Fp8Attention
    from vllm.diffusion.layers.mlp import GatedMLP
    from vllm.diffusion.layers.moe import ExpertsMLP
    from vllm.diffusion.layers.rotary import Rotary
    from vllm.diffusion.models.adapted_layers import AdaptedExperts
    from vllm.diffusion.models.config import Architecture, DiffusionConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig


class DiffusionLayer(nn.Module):
    """One layer as three stages; everything but attention is row-wise.

    Every stage accepts any chunk of rows, including an empty one. With tensor parallelism, the
    attend and the feed-forward stage each end in one all-reduce, so all ranks must use the same
    chunks.
    """

    def __init__(
        self,
        config: DiffusionConfig,
        index: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = AttentionWeights(config, quant_config, f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        kind = MixtureMLP if index in config.architecture.expert_layers else DenseMLP
        self.mlp: MixtureMLP | DenseMLP = kind(config, quant_config, f"{prefix}.mlp")

    @functools.cached_property
    def attention(self) -> SelfAttention:
        """The keys-values and attend stages; available after the weights are loaded."""
        return self.self_attn.stage(self.input_layernorm)

    @functools.cached_property
    def head_group_attention(self) -> HeadGroupAttention:
        """Attention by groups of heads; available after the weights are loaded."""
        return HeadGroupAttention(self.attention)

    @functools.cached_property
    def fp8_attention(self) -> Fp8Attention:
        """Attention with fp8 heads; available after the weights are loaded."""
        from vllm.diffusion.layers.fp8_attention import Fp8Attention

        return Fp8Attention(self.attention)

    @functools.cached_property
    def mlp_stage(self) -> GatedMLP | ExpertsMLP | AdaptedExperts:
        """The feed-forward stage; available after the weights are loaded."""
        return self.mlp.stage(self.post_attention_layernorm)

    def destinations(self, path: str) -> dict[str, Destination]:
        """Return the destination of each module of a checkpoint's layer, by Llama's names."""
        norms = ("input_layernorm", "post_attention_layernorm")
        width = tuple(self.input_layernorm.weight.shape)
        return {
            **{f"{path}.{norm}": Destination(f"{path}.{norm}", width) for norm in norms},
            **self.self_attn.destinations(f"{path}.self_attn"),
            **self.mlp.destinations(f"{path}.mlp"),
        }


class Transformer(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(
        self,
        config: DiffusionConfig,
        quant_config: QuantizationConfig | None,
        prefix: str,
        layer_class: type[DiffusionLayer] = DiffusionLayer,
    ) -> None:
        super().__init__()
        self.embed_tokens = without_weight_packing(
            VocabParallelEmbedding(
                config.architecture.num_embeddings,
                config.hidden_size,
                quant_config=quant_config,
                prefix=f"{prefix}.embed_tokens",
            )
        )
        self.layers = nn.ModuleList(
            layer_class(config, index, quant_config, f"{prefix}.layers.{index}")
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def destinations_of(architecture: Architecture, model: Transformer) -> dict[str, Destination]:
    """Return the destination of each module of a checkpoint, by the checkpoint's names."""
    names, width = architecture.module_names, tuple(model.norm.weight.shape)
    vocabulary = (architecture.num_embeddings, *width)
    shapes = {"model.embed_tokens": vocabulary, "model.norm": width, "lm_head": vocabulary}
    destinations = {
        names.get(name, name): Destination(name, shape) for name, shape in shapes.items()
    }
    for index, layer in enumerate(cast("Sequence[DiffusionLayer]", model.layers)):
        ours, stored = f"model.layers.{index}", architecture.layer_names[index]
        for path, destination in layer.destinations(ours).items():
            name = path.removeprefix(f"{ours}.")
            destinations[f"{stored}.{names.get(name, name)}"] = destination
    return destinations


def order_products(layers: Sequence[DiffusionLayer]) -> None:
    """Announce to each projection which weight is read next, after all weights are loaded."""
    before: ops.Projection | None = None
    for layer in layers:
        products = layer.mlp_stage.products
        for product in (*layer.attention.products, *products):
            if before is not None:
                before.precedes(product)
            before = product
        if not products:
            # Experts come in between.
            before = None


def run_whole(
    layers: Sequence[DiffusionLayer],
    x: Tensor,
    rotary: Rotary,
    spans: Sequence[Span],
    *,
    fp8_attention: bool = False,
    marks: Sequence[Tensor] = (),
) -> Tensor:
    """Run all layers on all rows in one chunk per stage, as upstream calls models; return x.

    Args:
        layers: the layers.
        x: [T, D], embeddings of one sequence, updated in place.
        rotary: rotary table rows of its positions.
        spans: all rows, and the keys that they read.
        fp8_attention: whether attention is fp8, as in forwards of long sequences.
        marks: tensors with an entry per row, for the feed-forward stages of some models.
    """
    buffers, layout = FreshBuffers(x.device), AttentionLayout.of(spans, x.device)
    for layer in layers:
        attention = layer.attention
        if fp8_attention:
            layer.fp8_attention.whole(x, rotary, layout, buffers)
            layer.mlp_stage.feed_forward(x, buffers)
            continue
        heads = attention.num_heads + 2 * attention.num_kv_heads
        product = x.new_empty(len(x), heads * attention.head_dim)
        attention.keys_values(x, rotary, product, buffers)
        q, k, v = attention.split(product)
        attention.attend(x, rotary, [KeySource(k, v, layout)], q, buffers)
        layer.mlp_stage.feed_forward(x, buffers, *marks)
    return x


def fp8_attention_by(device: torch.device, head_dim: int) -> str:
    """Return the library for fp8 attention of heads of this width on a device.

    Raises:
        ServerConfigError: no library is available.
    """
    from vllm.diffusion.layers import cudnn_fp8

    wanted = cudnn_fp8.why_not(device, head_dim)
    if wanted is not None:
        raise ServerConfigError(
            f"dllm settings: attention_dtype: given fp8; wanted model, or {wanted}"
        )
    return cudnn_fp8.described(device)

# SPDX-License-Identifier: Apache-2.0
"""Model of DiffusionGemma: Gemma 4's layers, self-conditioning, and logits with a soft cap."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from vllm.diffusion import ops
from vllm.diffusion.core import stages
from vllm.diffusion.core.errors import CheckpointError
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.layers.gemma_rows import Scalars, rounded_softmax, soft_cap
from vllm.diffusion.layers.gemma_stages import (
    GemmaAttention,
    GemmaFeedForward,
    Router,
    gelu_product,
    product_of,
)
from vllm.diffusion.layers.norm import RMSNorm
from vllm.diffusion.layers.parallel import without_weight_packing
from vllm.diffusion.layers.rotary import Rotary, inverse_frequencies
from vllm.diffusion.layers.split_attention import can_split
from vllm.diffusion.layers.windowed_attention import attend_in_window
from vllm.diffusion.models.diffusion_gemma import FULL, SLIDING, DiffusionGemmaConfig
from vllm.diffusion.models.expert_matrices import expert_matrices, scheme_of_experts
from vllm.diffusion.models.modules import AttentionWeights, DenseMLP
from vllm.diffusion.models.transformer import DiffusionLayer
from vllm.diffusion.models.upstream_model import UpstreamModel
from vllm.diffusion.models.weights import Destination
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ReplicatedLinear

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from vllm.config import VllmConfig
    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.models.config import DiffusionConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig

_NORMS = (
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"),
    *("post_feedforward_layernorm", "post_feedforward_layernorm_1"),
    *("post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"),
)
_DECODER = "model.decoder"
_SCALAR = "layer_scalar"
_ROWS = ("in_block", "in_context")
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class GemmaLayer(DiffusionLayer):
    """One layer of Gemma 4.

    `in_context` and `in_block` hold the factor of the residual stream after the layer, for rows of
    the context and for rows of a block.
    """

    def __init__(
        self,
        config: DiffusionConfig,
        index: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        nn.Module.__init__(self)
        assert isinstance(config, DiffusionGemmaConfig)
        for name in _NORMS:
            self.add_module(name, RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.self_attn = GemmaAttentionWeights(config, index, quant_config, f"{prefix}.self_attn")
        inner = config.intermediate_size
        self.dense = DenseMLP(config, quant_config, f"{prefix}.mlp", inner)
        self.router = GemmaRouter(config, f"{prefix}.router")
        self.experts = GemmaExperts(config, quant_config, f"{prefix}.experts")
        self.in_context, self.in_block = LayerScalar(), LayerScalar()

    @functools.cached_property
    def mlp_stage(self) -> GemmaFeedForward:  # type: ignore[override]
        norms = tuple(
            cast("RMSNorm", self.get_submodule(name))
            for name in (_NORMS[2], _NORMS[4], _NORMS[6], _NORMS[5], _NORMS[3])
        )
        return GemmaFeedForward(
            norms,  # type: ignore[arg-type]
            ops.projection_of(self.dense.gate_up_proj),
            ops.projection_of(self.dense.down_proj),
            self.dense.down_proj.input_size_per_partition,
            self.router.stage(),
            self.experts.w1.matrices,
            self.experts.w2.matrices,
            Scalars(self.in_block.layer_scalar.data, self.in_context.layer_scalar.data),
        )

    def destinations(self, path: str) -> dict[str, Destination]:
        width = tuple(cast("RMSNorm", self.get_submodule(_NORMS[0])).weight.shape)
        dense = self.dense.destinations(f"{path}.mlp")
        return {
            **{f"{path}.{norm}": Destination(f"{path}.{norm}", width) for norm in _NORMS},
            **self.self_attn.destinations(f"{path}.self_attn"),
            **{
                name: place._replace(module=place.module.replace(".mlp.", ".dense."))
                for name, place in dense.items()
            },
            **self.router.destinations(f"{path}.router"),
            **self.experts.destinations(f"{path}.experts"),
            **{f"{path}.{rows}": Destination(f"{path}.{rows}", (1,)) for rows in _ROWS},
        }


class LayerScalar(nn.Module):
    """Factor of the residual stream behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)


class GemmaAttentionWeights(AttentionWeights):
    """Projections of one layer. Layers without a value projection load that of the keys twice."""

    def __init__(
        self,
        config: DiffusionGemmaConfig,
        index: int,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__(config.of_layer(index), quant_config, prefix)
        self.window = config.heads(index).window
        width = config.head_dim
        is_full = config.layer_types[index] == FULL
        self.table_columns = slice(width, None) if is_full else slice(width)
        self.out_norm: RMSNorm | None = None

    def stage(self, norm: RMSNorm) -> GemmaAttention:
        """Create the stages over these weights, after they are loaded."""
        assert self.out_norm is not None and self.q_norm is not None
        plain = super().stage(norm)
        return GemmaAttention(
            **{name: value for name, value in vars(plain).items() if name != "kernel"},
            kernel=functools.partial(attend_in_window, scale=1.0, window=self.window),
            out_norm=self.out_norm,
            unit_gains=torch.ones_like(self.q_norm.weight.data),
            table_columns=self.table_columns,
        )


class GemmaRouter(nn.Module):
    """Weights of the choice of experts, with the checkpoint's names."""

    def __init__(self, config: DiffusionGemmaConfig, prefix: str) -> None:
        super().__init__()
        self.shape = (config.num_experts, config.hidden_size)
        self.num_chosen, self.eps = config.top_k_experts, config.rms_norm_eps
        self.proj = without_weight_packing(
            ReplicatedLinear(*self.shape[::-1], bias=False, prefix=f"{prefix}.proj")
        )
        num_experts, width = self.shape
        self.scale = nn.Parameter(torch.empty(width), requires_grad=False)
        # fp32, because weights of experts are fp32
        expert_scale = torch.empty(num_experts, dtype=torch.float32)
        self.per_expert_scale = nn.Parameter(expert_scale, requires_grad=False)

    def stage(self) -> Router:
        """Return the choice of experts with these weights, after they are loaded."""
        scales = self.scale.data, self.proj.weight.data, self.per_expert_scale.data
        return Router(*scales, self.num_chosen, self.eps)

    def destinations(self, path: str) -> dict[str, Destination]:
        """Return the destination of each module of a checkpoint below `path`."""
        return {
            path: Destination(path, (self.shape[1],)),
            f"{path}.proj": Destination(f"{path}.proj", self.shape),
        }


class GemmaExperts(nn.Module):
    """Stacked matrices of all experts of a layer."""

    def __init__(
        self, config: DiffusionGemmaConfig, quant_config: QuantizationConfig | None, prefix: str
    ) -> None:
        super().__init__()
        scheme = scheme_of_experts(quant_config, prefix)
        self.num_experts = config.num_experts
        self.shape = shape = (config.moe_intermediate_size, config.hidden_size)
        self.w1 = expert_matrices(config.num_experts, 2, shape, 0, scheme)
        self.w2 = expert_matrices(config.num_experts, 1, shape[::-1], 1, scheme)

    def destinations(self, path: str) -> dict[str, Destination]:
        """Return the destination of each module of a checkpoint below `path`."""
        destinations = {}
        for expert in range(self.num_experts):
            for part, name in enumerate(_EXPERTS["gate_up_proj"]):
                place = Destination(f"{path}.w1", self.shape, (expert, part))
                destinations[f"{path}.{expert}.{name}"] = place
            place = Destination(f"{path}.w2", self.shape[::-1], (expert, 0))
            destinations[f"{path}.{expert}.down_proj"] = place
        return destinations


class SelfConditioning(nn.Module):
    """MLP that adds the expected embedding of the previous step to the rows of a block."""

    unit_gains: Tensor

    def __init__(self, config: DiffusionGemmaConfig, prefix: str) -> None:
        super().__init__()
        self.pre_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DenseMLP(config, None, prefix, config.intermediate_size)
        self.register_buffer("unit_gains", torch.ones(config.hidden_size), persistent=False)

    def conditioned(self, x: Tensor, soft: Tensor) -> Tensor:
        """Return the norm of embeddings x [R, D] plus the MLP of `soft` [R, D]."""
        gate_up, down = (ops.projection_of(p) for p in (self.mlp.gate_up_proj, self.mlp.down_proj))
        width = self.mlp.down_proj.input_size_per_partition
        buffers = FreshBuffers(x.device)
        inner = gelu_product(self.pre_norm(soft), gate_up, width, x, buffers)
        total = product_of(down, inner, x, buffers).add_(x)
        return ops.rms_norm(total, self.unit_gains, self.pre_norm.eps)

    def destinations(self, path: str, stored: str) -> dict[str, Destination]:
        """Return the destinations of the modules of a checkpoint below `stored`."""
        width = tuple(self.pre_norm.weight.shape)
        return {
            f"{stored}.pre_norm": Destination(f"{path}.pre_norm", width),
            **{
                name.replace(f"{path}.mlp", stored): place
                for name, place in self.mlp.destinations(f"{path}.mlp").items()
            },
        }


class GemmaModel(UpstreamModel):
    """DiffusionGemma with upstream's interface and the stages that this engine runs."""

    layer_class = GemmaLayer

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        assert isinstance(config, DiffusionGemmaConfig)
        all_kv_heads, self.head_dim = config.cache_heads
        self.num_kv_heads = all_kv_heads // get_tensor_model_parallel_world_size()
        self.self_conditioning = SelfConditioning(config, "self_conditioning")
        self.cap: float = config.final_logit_softcapping
        self._captured_soft: Tensor | None = None
        self._soft: Tensor
        for layer in self.layers:
            layer.self_attn.out_norm = layer.get_submodule(_NORMS[1])

    def frequencies(self, config: DiffusionConfig) -> Tensor:
        """Return the rotary frequencies of sliding layers, then of full layers."""
        assert isinstance(config, DiffusionGemmaConfig)
        widths = {SLIDING: config.head_dim, FULL: config.global_head_dim}
        parts = []
        for kind, width in widths.items():
            rope = config.rope_parameters[kind]
            own = inverse_frequencies(rope["rope_theta"], width) / (rope.get("factor") or 1.0)
            num_pairs = int((rope.get("partial_rotary_factor") or 1.0) * width // 2)
            own[num_pairs:] = 0.0
            parts.append(own)
        self.widths = tuple(widths.values())
        return torch.cat(parts)

    def rotary(self, positions: Tensor, buffers: Buffers | None = None) -> Rotary:
        """Return both kinds' rotary tables of positions [T], side by side."""
        buffers = buffers or FreshBuffers(positions.device)
        tables = stages.rotary(self.dtype, sum(self.widths), scales=False)
        cos, sin = (table.take(buffers, positions.numel()) for table in tables)
        sliding = self.widths[0]
        for columns, pairs in (
            (slice(sliding), slice(sliding // 2)),
            (slice(sliding, None), slice(sliding // 2, None)),
        ):
            frequencies = self.rotary_frequencies[pairs]
            own = [torch.empty_like(table[:, columns]) for table in (cos, sin)]
            ops.rotary_tables(positions, frequencies, *own)
            cos[:, columns], sin[:, columns] = own
        return Rotary(cos, sin)

    def can_be_captured(self, device: torch.device) -> bool:
        return self.reads_pages(device)

    def reads_pages(self, device: torch.device) -> bool:
        return all(can_split(self.dtype, width, device) for width in self.widths)

    def embed(self, ids: Tensor, out: Tensor) -> Tensor:
        return super().embed(ids, out).mul_(self.embedding_scale)

    @property
    def embedding_scale(self) -> float:
        """Factor of embeddings: the root of the width, rounded to the model dtype."""
        return float(torch.tensor(self.hidden_size**0.5, dtype=self.dtype))

    def soft_rows(self, num_rows: int, captured_rows: int) -> Tensor:
        """Return memory [num_rows, D] for the expected embeddings of the next step's rows.

        Rows of a block have the result of `expected_embeddings` in the previous step, and zeros in
        the first step. Other rows are not read. Up to `captured_rows`, which graphs may compute,
        the address stays the same.
        """
        if self._captured_soft is None:
            weight = self.model.norm.weight
            self._captured_soft = weight.new_empty(captured_rows, self.hidden_size)
        self._soft = self._captured_soft
        if num_rows > captured_rows:
            self._soft = self._captured_soft.new_empty(num_rows, self.hidden_size)
        return self._soft[:num_rows]

    def condition(self, x: Tensor, is_block: Tensor | None) -> tuple[Tensor, ...]:
        """Add self-conditioning to the embeddings x [T, D] of rows in blocks, in place."""
        assert is_block is not None
        conditioned = self.self_conditioning.conditioned(x, self._soft[: len(x)])
        torch.where(is_block[:, None], conditioned, x, out=x)
        return (is_block,)

    def expected_embeddings(self, logits: Tensor) -> Tensor:
        """Return the embeddings [R, D] that the distributions of logits [R, V] fp32 expect."""
        table = self.model.embed_tokens.weight[: self.num_columns]
        shares = rounded_softmax(logits, table.dtype)
        expected: Tensor = shares[:, self.vocab_start :][:, : self.num_columns] @ table
        if self.num_columns < self.vocab_size:
            expected = ops.tensor_parallel().sum(expected)
        return expected.mul_(self.embedding_scale)

    @property
    def head_matrix(self) -> Tensor | None:
        """None, because logits have a soft cap."""
        return None

    def compute_logits(self, hidden_states: Tensor, buffers: Buffers | None = None) -> Tensor:
        """Compute logits [R, V] fp32; see `DiffusionModel` for the arguments."""
        if buffers is not None:
            for buffer in stages.capped(self.dtype, self.num_columns):
                buffer.expect(buffers, len(hidden_states))
        matrix = self.head.matrix(slice(0, self.num_columns))
        if matrix is not None and hidden_states.is_cuda and hidden_states.dtype != torch.float32:
            return soft_cap(torch.mm(hidden_states, matrix.t(), out_dtype=torch.float32), self.cap)
        return soft_cap(super().compute_logits(hidden_states, buffers).float(), self.cap)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        assert isinstance(self.config, DiffusionGemmaConfig)
        return super().load_weights(_text_weights(weights, self.config))

    def destinations(self) -> tuple[dict[str, Destination], set[str]]:
        destinations, ignored = super().destinations()
        path, stored = "self_conditioning", f"{_DECODER}.self_conditioning"
        return {**destinations, **self.self_conditioning.destinations(path, stored)}, ignored


def _text_weights(
    weights: Iterable[tuple[str, Tensor]], config: DiffusionGemmaConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the text model, one for each matrix, by our names.

    Images and the encoder's other tensors are skipped. Stacked experts are split into views. Full
    layers have no value projection, so that of the keys is yielded under its name, too.

    Raises:
        CheckpointError: a stacked tensor has another shape.
    """
    inner, width = config.moe_intermediate_size, config.hidden_size
    shapes = {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}
    for name, tensor in weights:
        path, _, kind = name.rpartition(".")
        if kind == _SCALAR:
            index = path.rpartition(".")[2]
            rows = _ROWS[path.startswith("model.encoder.")]
            yield f"{_DECODER}.layers.{index}.{rows}.{_SCALAR}", tensor
        elif name.startswith("model.encoder."):
            continue
        elif path.endswith(".experts") and kind in shapes:
            wanted = (config.num_experts, *shapes[kind])
            if tuple(tensor.shape) != wanted:
                raise CheckpointError(
                    f"{name}: given shape {list(tensor.shape)}; config.json requires {list(wanted)}"
                )
            parts = _EXPERTS[kind]
            for expert, matrix in enumerate(tensor):
                for part, own in zip(parts, matrix.chunk(len(parts)), strict=True):
                    yield f"{path}.{expert}.{part}.weight", own
        else:
            yield name, tensor
            owner, _, module = path.rpartition(".")
            layer = owner.removeprefix(f"{_DECODER}.layers.").partition(".")[0]
            if module == "k_proj" and config.layer_types[int(layer)] == FULL:
                yield f"{owner}.v_proj.{kind}", tensor

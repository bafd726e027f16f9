# SPDX-License-Identifier: Apache-2.0
"""A diffusion language model: one transformer, as described by its configuration.

Layers are Llama's without a mask; differences between families are facts of their configurations
(`config.py`). Modules have Llama's names, regardless of the checkpoint's names. Letters: T rows of
the packed batch, R rows of a chunk, D hidden size, H and KV query and key/value heads of this rank,
hd head width, V logit columns.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

import torch

from vllm.diffusion import ops
from vllm.diffusion.config import settings_of
from vllm.diffusion.core import stages
from vllm.diffusion.core.stages import FreshBuffers
from vllm.diffusion.layers.attention_backends import (
    available_backends,
    can_be_captured,
    reads_pages,
)
from vllm.diffusion.layers.parallel import without_weight_packing
from vllm.diffusion.layers.rotary import Rotary, inverse_frequencies, rotary_rows
from vllm.diffusion.layers.yarn import yarn_frequencies
from vllm.diffusion.models.transformer import DiffusionLayer, Transformer
from vllm.diffusion.models.updates import Updatable
from vllm.diffusion.models.weights import checkpoint_name, module_names
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import maybe_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from vllm.config import VllmConfig
    from vllm.diffusion.adapters.adapted_rows import AdaptedRows
    from vllm.diffusion.core.stages import Buffers
    from vllm.diffusion.models.config import DiffusionConfig


class DiffusionModel(Updatable):
    """The stages of a checkpoint's model; `upstream_model.py` adds upstream's interface.

    Attributes:
        family: facts common to all checkpoints of the family.
        hidden_size, num_heads, num_kv_heads, head_dim: D, H, KV, hd (heads of this rank).
        vocab_size: V of the whole model, the rows of its embedding and of its head.
        vocab_start, num_columns: first logit column of this rank, and number of its columns.
        adapting: the rows that use LoRA adapters; None in an engine without them.
    """

    rotary_frequencies: Tensor
    adapting: AdaptedRows | None = None
    layer_class: type[DiffusionLayer] = DiffusionLayer

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: DiffusionConfig = vllm_config.model_config.hf_config
        quant_config = vllm_config.quant_config
        # Lists of modules use the checkpoint's names.
        if isinstance(quant_config, ops.SchemeConfig):
            quant_config.use_names(functools.partial(checkpoint_name, config.architecture))
        elif quant_config is not None:
            quant_config.apply_vllm_mapper(module_names(config.architecture))
        self.config, self.family = config, config.family
        self.architecture = architecture = config.architecture
        of_model = maybe_prefix(prefix, "model")
        self.model = Transformer(config, quant_config, of_model, self.layer_class)
        self.lm_head = without_weight_packing(
            ParallelLMHead(
                architecture.num_embeddings,
                config.hidden_size,
                bias=architecture.has_bias and not config.tie_word_embeddings,
                quant_config=quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.is_batch_invariant = settings_of(vllm_config).batch_invariant
        if self.is_batch_invariant:
            ops.make_invariant(self)
        self._growth = architecture.growth_within(vllm_config.model_config.max_model_len)
        self.register_buffer("rotary_frequencies", self.frequencies(config), persistent=False)

        qkv_proj, shard = self.layers[0].self_attn.qkv_proj, self.lm_head.shard_indices
        self.hidden_size = config.hidden_size
        self.num_heads: int = qkv_proj.num_heads
        self.num_kv_heads: int = qkv_proj.num_kv_heads
        self.head_dim = config.head_dim
        self.vocab_size = architecture.num_embeddings
        self.vocab_start: int = shard.org_vocab_start_index
        self.num_columns: int = shard.num_org_elements

    def frequencies(self, config: DiffusionConfig) -> Tensor:
        """Return the frequencies [rd / 2] fp32 of the rotary embedding."""
        plain = inverse_frequencies(config.rope_theta, self.architecture.rotary_dim)
        return yarn_frequencies(plain, config.rope_theta, self.architecture.yarn)

    @property
    def layers(self) -> Sequence[DiffusionLayer]:
        """The layers, first to last."""
        return cast("Sequence[DiffusionLayer]", self.model.layers)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the residual stream, of keys and values, and of logits."""
        return self.model.norm.weight.dtype

    @property
    def is_fp8(self) -> bool:
        """Whether products take rows of fp8; available after the weights are loaded."""
        return self.layers[0].attention.qkv_proj.quantises

    @property
    def routes_windows(self) -> bool:
        """Whether rows choose their experts together, by windows of consecutive rows."""
        return self.architecture.scoring.window > 0

    def attention_backends(self, device: torch.device) -> list[str]:
        """Return the names of the backends that may compute attention on a device."""
        backends = available_backends(self.dtype, self.head_dim, device)
        return [backend.name.lower() for backend in backends]

    def can_be_captured(self, device: torch.device) -> bool:
        """Whether a CUDA graph can contain the layers: attention needs no data of the host."""
        return can_be_captured(self.dtype, self.head_dim, device)

    def reads_pages(self, device: torch.device) -> bool:
        """Whether attention reads cached keys in their pages, and a graph can contain that too."""
        return reads_pages(self.dtype, self.head_dim, device)

    def embed(self, ids: Tensor, out: Tensor) -> Tensor:
        """Write the embeddings of ids [T] to out [T, D], and return out."""
        ops.embed_rows(self.model.embed_tokens, ids, out)
        scale = self.architecture.embedding_scale
        return out if scale == 1.0 else out.mul_(scale)

    def condition(self, x: Tensor, is_block: Tensor | None) -> tuple[Tensor, ...]:
        """Change the embeddings x [T, D] of rows in blocks (is_block [T] bool), in place.

        Returns:
            tensors with an entry per row, for the feed-forward stages; most models need none.
        """
        return ()

    def rotary(self, positions: Tensor, buffers: Buffers | None = None) -> Rotary:
        """Return rotary table rows of positions [T], in `buffers` if given.

        Positions count from the start of their sequence.
        """
        dtype = torch.float32 if self.architecture.rotates_in_fp32 else self.dtype
        of_positions = positions, self.rotary_frequencies
        return rotary_rows(*of_positions, dtype=dtype, buffers=buffers, growth=self._growth)

    def final_norm(self, x: Tensor, buffers: Buffers | None = None) -> Tensor:
        """Apply the last norm to x [R, D]; the result is in `buffers` if given."""
        buffer, _ = stages.head(self.dtype, self.hidden_size, self.num_columns)
        out = buffer.take(buffers or FreshBuffers(x.device), len(x))
        normed: Tensor = self.model.norm(x, out=out)
        return normed

    @functools.cached_property
    def head(self) -> ops.Projection:
        """The output head; available after the weights are loaded."""
        return ops.projection_of(self.lm_head)

    @property
    def head_matrix(self) -> Tensor | None:
        """Output matrix [V, D] if logits are its product with normed hidden states.

        None if logits are also scaled, if this rank does not have all columns, or if tokens must be
        drawn from stored logits, so that they do not depend on the number of rows.
        """
        is_whole = self.num_columns == self.vocab_size and self.architecture.logits_scale == 1.0
        if not is_whole or self.is_batch_invariant:
            return None
        return self.head.matrix(slice(0, self.num_columns))

    def compute_logits(self, hidden_states: Tensor, buffers: Buffers | None = None) -> Tensor:
        """Compute the logits of this rank's columns.

        Args:
            hidden_states: [R, D], normed.
            buffers: memory for the result and its computation; None allocates.

        Returns:
            [R, columns of this rank], the model dtype; column j is token `vocab_start` + j.
            The padding columns of the head's matrix are not included.
        """
        buffers = buffers or FreshBuffers(hidden_states.device)
        _, buffer = stages.head(self.dtype, self.hidden_size, self.num_columns)
        out = buffer.take(buffers, len(hidden_states))
        self.head.project(hidden_states, out, buffers, slice(0, self.num_columns))
        scale = self.architecture.logits_scale
        return out if scale == 1.0 else out.mul_(scale)

# SPDX-License-Identifier: Apache-2.0
"""What every diffusion language model offers to the engine.

Letters: T rows of the packed batch, R rows of a chunk, D hidden size, H and KV query and key/value
heads of this rank, hd head width, V logit columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import nn

from vllm.diffusion.spans import AttentionLayout, KeySource, Span
from vllm.diffusion.buffers import FreshBuffers
from vllm.diffusion.layers.attention_backends import can_be_captured

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor

    from vllm.diffusion.families import Family
    from vllm.diffusion.layers.attention import SelfAttention
    from vllm.diffusion.buffers import Buffers
    from vllm.diffusion.layers.rotary import Rotary


class FeedForward(Protocol):
    """The feed-forward stage of a layer."""

    def feed_forward(self, x: Tensor, buffers: Buffers) -> None:
        """x [R, D] += feed-forward of its norm, in place."""


class DiffusionLayer(nn.Module):
    """One layer as three stages; all but the attention between rows is row-wise.

    Every stage accepts any chunk of rows, also none. Under tensor parallelism `attend` and
    `feed_forward` end in one all-reduce each, so all ranks must use the same chunks. What a stage
    needs besides its results is taken from `buffers`; without them PyTorch allocates it.

    A family's layer owns the weights under their checkpoint names and sets the two attributes.

    Attributes:
        attention: the keys-values and attend stages over these weights.
        mlp_stage: the feed-forward stage over these weights.
    """

    attention: SelfAttention
    mlp_stage: FeedForward

    def keys_values(
        self, x: Tensor, rotary: Rotary, out: Tensor, buffers: Buffers | None = None
    ) -> None:
        """Write the projections of x [R, D] to out, queries and keys rotated.

        `out` is [R, (H + 2 KV) hd], or [R, 2 KV hd] where the queries are not wanted.
        """
        self.attention.keys_values(x, rotary, out, buffers or FreshBuffers(x.device))

    def attend(
        self,
        x: Tensor,
        rotary: Rotary,
        sources: Sequence[KeySource],
        q: Tensor | None = None,
        buffers: Buffers | None = None,
    ) -> None:
        """x [R, D] += output projection of attention to the keys of `sources`, in place.

        Without q [R, H, hd] the queries are computed from x, which this layer must not have
        updated yet.
        """
        self.attention.attend(x, rotary, sources, q, buffers or FreshBuffers(x.device))

    def feed_forward(self, x: Tensor, buffers: Buffers | None = None) -> None:
        """x [R, D] += feed-forward of its norm, in place."""
        self.mlp_stage.feed_forward(x, buffers or FreshBuffers(x.device))


class DiffusionModel(nn.Module, ABC):
    """A diffusion language model: stages for the engine, and upstream's model interface.

    Attributes:
        family: facts that hold for all checkpoints of the family.
        hidden_size, num_heads, num_kv_heads, head_dim: D, H, KV, hd (heads of this rank).
        vocab_size: V of the whole model, the rows of its embedding and of its head.
        vocab_start, num_columns: the first logit column of this rank, and how many it has.
    """

    family: ClassVar[Family]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    vocab_start: int
    num_columns: int

    @property
    @abstractmethod
    def layers(self) -> Sequence[DiffusionLayer]:
        """The layers, first to last."""

    @property
    def dtype(self) -> torch.dtype:
        """The model dtype: of the residual stream, the keys and values and the logits."""
        parameter: Tensor = self.final_norm_weight
        return parameter.dtype

    def can_be_captured(self, device: torch.device) -> bool:
        """Whether a CUDA graph can hold the layers: attention needs nothing of the host."""
        return can_be_captured(self.dtype, self.head_dim, device)

    @property
    @abstractmethod
    def final_norm_weight(self) -> Tensor:
        """The gains [D] of the last norm."""

    @abstractmethod
    def embed(self, ids: Tensor, out: Tensor) -> Tensor:
        """Write the embeddings of ids [T] to out [T, D], and return out."""

    @abstractmethod
    def rotary(self, positions: Tensor, buffers: Buffers | None = None) -> Rotary:
        """Rotary table rows of positions [T], in `buffers` where they are given.

        A position counts from its sequence's start.
        """

    @abstractmethod
    def final_norm(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """The last norm of x [R, D], into `out` where it is given."""

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits of this rank's columns.

        Args:
            hidden_states: [R, D], normed.
            out: [R, columns of this rank], contiguous; None allocates.

        Returns:
            [R, columns of this rank], the model dtype; column j is token `vocab_start` + j.
            The padding of the head's matrix is not among them.
        """

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint; returns the names of the parameters that were filled.

        Raises:
            CheckpointError: naming the tensors that are missing or not part of the model.
        """

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, D] of ids [T], in a new tensor."""
        shape = (*input_ids.shape, self.hidden_size)
        return self.embed(input_ids, self.final_norm_weight.new_empty(shape))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The final, normed hidden states [T, D] of one sequence, every stage in one chunk.

        Args:
            input_ids: [T] token ids; unused where `inputs_embeds` is given.
            positions: [T].
            intermediate_tensors: upstream's argument for pipeline parallelism; always None.
            inputs_embeds: [T, D], in place of ids.
        """
        if inputs_embeds is not None:
            x = inputs_embeds.clone()
        elif input_ids is not None:
            x = self.embed_input_ids(input_ids)
        else:
            raise ValueError("input_ids: wanted token ids, or inputs_embeds; given neither")
        num_rows = x.shape[0]
        rotary = self.rotary(positions)
        product = x.new_empty(num_rows, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim)
        layout = AttentionLayout.of([Span(0, num_rows, 0, num_rows)], x.device)
        for layer in self.layers:
            layer.keys_values(x, rotary, product)
            q, k, v = layer.attention.split(product)
            layer.attend(x, rotary, [KeySource(slice(0, num_rows), k, v, layout)], q)
            layer.feed_forward(x)
        return self.final_norm(x)

# SPDX-License-Identifier: Apache-2.0
"""Layers over one whole sequence, in one chunk a stage: a model called as upstream calls models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.diffusion.core.buffers import FreshBuffers
from vllm.diffusion.core.spans import AttentionLayout, KeySource, Span

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.models.base import DiffusionModel


def run_whole(model: DiffusionModel, x: Tensor, positions: Tensor) -> Tensor:
    """Run all layers on x [T, D], the embeddings of a sequence, in place; return x.

    The family's visibility applies, in blocks of the configuration's length.

    Args:
        model: the model.
        x: [T, D], the model dtype.
        positions: [T] int64, from 0 on.
    """
    num_rows, buffers = x.shape[0], FreshBuffers(x.device)
    rotary = model.rotary(positions)
    product = x.new_empty(num_rows, (model.num_heads + 2 * model.num_kv_heads) * model.head_dim)
    visibility = model.family.visibility.with_blocks_of(model.config.block_length)
    span = Span(0, num_rows, 0, num_rows, visibility.block_length)
    layout = AttentionLayout.of([span], x.device)
    for layer in model.layers:
        layer.attention.keys_values(x, rotary, product, buffers)
        q, k, v = layer.attention.split(product)
        layer.attention.attend(x, rotary, [KeySource(k, v, layout)], q, buffers)
        layer.mlp_stage.feed_forward(x, buffers)
    return x

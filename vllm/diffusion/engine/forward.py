# SPDX-License-Identifier: Apache-2.0
"""One forward of a packed batch: layers x stages x chunks.

Only attention mixes rows, so every other stage may run on any chunk of rows. The residual stream
and one layer's keys and values are all that lives from stage to stage.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from vllm.diffusion.layers.attention import Span
from vllm.diffusion.memory import BufferPool, Plan, chunks

if TYPE_CHECKING:
    import torch

    from vllm.diffusion.engine.batch import StepBatch
    from vllm.diffusion.models.base import DiffusionModel


def forward(
    model: DiffusionModel, batch: StepBatch, plan: Plan, buffers: BufferPool
) -> torch.Tensor:
    """Residual stream [T, D] after the last layer; it is a buffer of `buffers`."""
    rows = batch.num_rows
    dtype = model.dtype
    heads = (rows, model.num_heads, model.head_dim)
    kv_heads = (rows, model.num_kv_heads, model.head_dim)
    x = model.embed(batch.token_ids, buffers.take("x", (rows, model.hidden_size), dtype))
    k = buffers.take("k", kv_heads, dtype)
    v = buffers.take("v", kv_heads, dtype)
    q = buffers.take("q", heads, dtype) if plan.keep_queries else None
    rotary = model.rotary(batch.positions)
    spans = [(part, _spans(batch.boundaries, part)) for part in chunks(rows, plan.attend_rows)]
    for layer in model.layers:
        for part in chunks(rows, plan.keys_values_rows):
            queries = None if q is None else q[part]
            layer.keys_values(
                x[part], rotary.rows(part.start, part.stop), k[part], v[part], queries
            )
        for part, part_spans in spans:
            queries = None if q is None else q[part]
            layer.attend(x[part], rotary.rows(part.start, part.stop), k, v, part_spans, queries)
        for part in chunks(rows, plan.feed_forward_rows):
            layer.feed_forward(x[part])
    return x


def _spans(boundaries: tuple[int, ...], part: slice) -> tuple[Span, ...]:
    """The queries of each sequence in a chunk of rows, with all keys of that sequence."""
    found = []
    for start, end in itertools.pairwise(boundaries):
        first, last = max(start, part.start), min(end, part.stop)
        if first < last:
            found.append(Span(first - part.start, last - part.start, start, end))
    return tuple(found)

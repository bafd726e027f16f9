# SPDX-License-Identifier: Apache-2.0
"""Attention with a sliding window and a given scale.

Rows of a causal context read the keys of a window that ends with their own. All rows of a block
that is denoised behind the context read the whole block, and the window that ends before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from vllm.diffusion.layers.split_attention import can_split, split_attention

if TYPE_CHECKING:
    from torch import Tensor

    from vllm.diffusion.core.spans import AttentionLayout, Span

_MAX_ROWS = 256  # rows of a context under one mask


def attend_in_window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: AttentionLayout[Tensor],
    out: Tensor | None = None,
    *,
    scale: float,
    window: int,
) -> Tensor:
    """Compute softmax(scale q k^T) v of every sequence.

    Where `split_attention` cannot serve, PyTorch computes one sequence at a time.

    Args:
        q: [R, H, hd].
        k, v: [N, KV, hd], KV dividing H; rows may be strided.
        layout: the sequences. Rows of a context lie on a grid of blocks of one position, unless
            there is only one. PyTorch requires spans on the host.
        out: [R, H, hd], written.
        scale: factor of the products of queries and keys.
        window: number of keys that a row of the context reads, its own included; 0 for all.

    Returns:
        [R, H, hd] contiguous; `out` if given.
    """
    if can_split(q.dtype, q.shape[2], q.device):
        if window and layout.firsts is None:  # there are only single rows of contexts
            nothing = torch.zeros_like(layout.key_counts)
            layout = layout._replace(block_lengths=nothing, firsts=layout.key_counts - 1)
        return split_attention(q, k, v, layout, out, scale=scale, window=window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    assert layout.spans is not None  # no graph contains this
    for span in layout.spans:
        for start in range(span.q_start, span.q_end, _MAX_ROWS):
            stop = min(start + _MAX_ROWS, span.q_end)
            first, end, mask = _keys(span, start - span.q_start, stop - span.q_start, window)
            rows = slice(span.kv_start + first, span.kv_start + end)
            keys, values = k[rows], v[rows]
            if layout.pages is not None:
                places = layout.pages.rows_of(span.kv_start, rows.stop)[first:]
                keys, values = k.index_select(0, places), v.index_select(0, places)
            queries, keys, values = (
                part.transpose(0, 1)[None] for part in (q[start:stop], keys, values)
            )
            read = functional.scaled_dot_product_attention(
                *(queries, keys, values),
                None if mask is None else mask.to(q.device),
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[start:stop] = read[0].transpose(0, 1)
    return out


def _keys(span: Span, start: int, stop: int, window: int) -> tuple[int, int, Tensor | None]:
    """Return the first key and the last + 1 that some rows of a span read, and which reads which.

    The mask is [rows, keys] bool; None if every row reads all of them. Keys and rows are counted
    from the span's first.
    """
    if span.block_start >= 0:
        first = max(span.block_start - window + 1, 0) if window else 0
        return first, span.num_keys, None
    # The position of the first row. A single row needs no grid.
    begin = span.first if span.block_length else span.num_keys - span.num_queries
    positions = torch.arange(begin + start, begin + stop)
    first = max(begin + start - window + 1, 0) if window else 0
    keys = torch.arange(first, begin + stop)
    mask = keys <= positions[:, None]
    if window:
        mask &= keys > positions[:, None] - window
    return first, begin + stop, mask
